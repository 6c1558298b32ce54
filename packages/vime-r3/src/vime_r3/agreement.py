"""How far two routings of the same tokens agree: the engine's and the trainer's own."""

from __future__ import annotations

import dataclasses

import numpy as np

from vime_proto.errors import ContractError

__all__ = ["Agreement", "compare"]


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Counts over tokens and layers; a flip is a token that two routings give another set of experts in a layer.

    Attributes:
        layer_ids: global numbers of the layers.
        tokens: tokens that were compared.
        flips: flips in each layer, int64 ``[layers]``.
        tokens_with_flip: tokens with a flip in at least one layer.
        experts_changed: experts that are in one set and not in the other, in all tokens and layers.
    """

    layer_ids: tuple[int, ...]
    tokens: int
    flips: np.ndarray
    tokens_with_flip: int
    experts_changed: int

    @property
    def rows(self) -> int:
        """Token-layer pairs that were compared."""
        return self.tokens * len(self.layer_ids)

    @property
    def layer_agreement(self) -> np.ndarray:
        """Tokens that both give the same set, over tokens, float64 ``[layers]``; 1 when nothing was compared."""
        return 1.0 - self.flips / self.tokens if self.tokens else np.ones(len(self.layer_ids))

    @property
    def flip_share(self) -> float:
        """Flips over token-layer pairs; 0 when nothing was compared. 2510.11370 reports about 0.1."""
        return float(self.flips.sum()) / self.rows if self.rows else 0.0

    @property
    def token_share(self) -> float:
        """Tokens with a flip over tokens; 0 when nothing was compared. 2510.11370 reports 0.94."""
        return self.tokens_with_flip / self.tokens if self.tokens else 0.0


def compare(
    live: np.ndarray, replayed: np.ndarray, *, layer_ids: tuple[int, ...], valid: np.ndarray | None = None
) -> Agreement:
    """Compares two arrays of top-k ids as sets; the order of a row's experts does not matter.

    Args:
        live: integers ``[rows, layers, top_k]``, what the trainer's router chose.
        replayed: the same shape, what the engine's router chose.
        layer_ids: global numbers of the layers.
        valid: bool ``[rows]``; false rows are left out. Default: all count.

    Raises:
        ContractError: shapes that differ.
    """
    live, replayed = np.asarray(live), np.asarray(replayed)
    if live.ndim != 3 or live.shape != replayed.shape or live.shape[1] != len(layer_ids):
        raise ContractError(
            "replayed",
            f"live {list(live.shape)} and replayed {list(replayed.shape)} must be [rows, {len(layer_ids)}, k]",
        )
    if valid is not None:
        live, replayed = live[valid], replayed[valid]
    changed = np.zeros(live.shape[:2], dtype=np.int64)
    for place in range(live.shape[2]):
        changed += ~(live == replayed[:, :, place : place + 1]).any(axis=2)
    flipped = changed > 0
    return Agreement(
        layer_ids=tuple(layer_ids),
        tokens=len(live),
        flips=flipped.sum(axis=0, dtype=np.int64),
        tokens_with_flip=int(flipped.any(axis=1).sum()),
        experts_changed=int(changed.sum()),
    )
