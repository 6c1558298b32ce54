"""The one batch layout of the trainer: sequences laid end to end, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["PackedBatch", "RecordRows", "ReplayRows", "TokenOutputs", "pack"]


@dataclass(frozen=True)
class ReplayRows:
    """Experts chosen by the engine for each token of a packed batch; vime_r3.layout.pack makes `ids` and `valid`.

    Attributes:
        ids: integers [T, layers, top_k]; row i routes token i.
        valid: bool [T]; tokens that are false route themselves.
        layer_ids: global layer numbers of `ids`, counted from 0.
        measure: count rows that are replayed, and tokens that the model alone would have routed otherwise.
        exact: bool [T]; tokens whose rows are what the engine computed; None when nothing is said of it.
        fetched: bool [T]; tokens whose rows this rank has asked for. Where it is true and `valid` is not there is a hole;
            where it is false nothing is known, and a rank that routes such a token refuses. None: all.
    """

    ids: Any
    valid: Any
    layer_ids: tuple[int, ...]
    measure: bool = False
    exact: Any = None
    fetched: Any = None


@dataclass(frozen=True)
class RecordRows:
    """In place of routes: the model routes itself, and `recorded` of the policy says afterwards how."""


@dataclass(frozen=True)
class PackedBatch:
    """S sequences of T tokens in all, laid end to end.

    Attributes:
        tokens: int64 [T], token ids.
        positions: int64 [T], index of each token within its sequence, from 0.
        cu_seqlens: int32 [S + 1], first token of each sequence, then T; ascending, no sequence is empty.
        temperature: float32 [T], > 0; logits that predict token i are divided by temperature[i].
        routes: expert routes to replay, or RecordRows; None lets the model route itself.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    temperature: Tensor
    routes: ReplayRows | RecordRows | None = None

    def __post_init__(self) -> None:
        count = self.tokens.numel()
        wanted = {
            "tokens": torch.int64,
            "positions": torch.int64,
            "cu_seqlens": torch.int32,
            "temperature": torch.float32,
        }
        for name, dtype in wanted.items():
            value = getattr(self, name)
            if value.dim() != 1 or value.dtype != dtype:
                shape = tuple(value.shape)
                raise ValueError(f"PackedBatch.{name}: need a 1-d {dtype} tensor, got {value.dtype} of shape {shape}")
            if name != "cu_seqlens" and value.numel() != count:
                raise ValueError(f"PackedBatch.{name}: {value.numel()} entries for {count} tokens")
        if count == 0:
            raise ValueError("PackedBatch.tokens: an empty batch")

    @property
    def total(self) -> int:
        """Number of tokens T."""
        return self.tokens.numel()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence; copies cu_seqlens to the host."""
        return self.cu_seqlens.diff().tolist()

    def to(self, device: torch.device | str) -> PackedBatch:
        """Copies the four tensors to `device`; `routes` stays where it is, its consumer moves it."""
        names = ("tokens", "positions", "cu_seqlens", "temperature")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


@dataclass(frozen=True)
class TokenOutputs:
    """What a forward pass says of each token, given the tokens before it in its sequence.

    Attributes:
        logprobs: float32 [T], natural log of the probability of token i; 0 for the first token of a sequence.
        entropy: float32 [T], entropy in nats of the distribution that token i was drawn from; 0 for the first token.
        usage: vime_r3.megatron.Usage of the pass, of all MoE layers and tokens on whichever ranks they are; None when no
            routes were replayed.
    """

    logprobs: Tensor
    entropy: Tensor
    usage: Any = None


def pack(
    sequences: Sequence[Sequence[int] | Tensor],
    temperature: float | Sequence[float] = 1.0,
    routes: ReplayRows | None = None,
) -> PackedBatch:
    """Lays sequences of token ids end to end.

    Args:
        sequences: token ids of each sequence, none of them empty.
        temperature: one for all tokens, or one a sequence.
        routes: passed on as it is.

    Raises:
        ValueError: no sequence, an empty one, or a temperature that is not > 0.
    """
    if not sequences:
        raise ValueError("pack: no sequences")
    rows = [torch.as_tensor(row, dtype=torch.int64) for row in sequences]
    for index, row in enumerate(rows):
        if row.numel() == 0:
            raise ValueError(f"pack: sequence {index} is empty")
    lengths = torch.tensor([row.numel() for row in rows])
    heat = torch.as_tensor(temperature, dtype=torch.float32)
    if heat.dim() == 1 and heat.numel() != len(rows):
        raise ValueError(f"pack: {heat.numel()} temperatures for {len(rows)} sequences")
    if not bool((heat > 0).all()):
        raise ValueError(f"pack: temperature must be > 0, got {temperature}")
    bounds = torch.zeros(len(rows) + 1, dtype=torch.int32)
    bounds[1:] = lengths.cumsum(0)
    total = int(bounds[-1])
    starts = bounds[:-1].to(torch.int64)
    return PackedBatch(
        tokens=torch.cat(rows),
        positions=torch.arange(total) - starts.repeat_interleave(lengths),
        cu_seqlens=bounds,
        temperature=heat.expand(len(rows)).repeat_interleave(lengths).contiguous(),
        routes=routes,
    )
