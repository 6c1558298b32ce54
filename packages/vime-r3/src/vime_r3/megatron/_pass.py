"""One forward pass of a model, and what its routers did in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from vime_r3.megatron._rows import Rows

_COMPARED = 1 << 27
"""Most pairs of ids that are compared at once, a byte each."""


class ReplayError(RuntimeError):
    """Routes were not used exactly once, or do not fit the tokens."""


@dataclasses.dataclass
class Usage:
    """What ``use`` counted; read it after the forward pass. Tensors stay on the model's device: reading them waits for it.

    Attributes:
        layer_ids: global numbers of this model's MoE layers.
        tokens: tokens of the micro-batch, with holes.
        flips: int64 ``[layers]``: tokens that the trainer alone would have routed otherwise; None unless measured.
        flipped: bool ``[tokens]``: such tokens in any layer; None unless measured.
        recomputed: how often each layer's router ran in the last backward pass, which is how often it read its rows
            again; None before one.
        replayed: int64 ``[tokens]``: in how many of these layers each token took the row that was given; 0 for a hole. None
            unless measured.
        inexact: bool ``[tokens]``: tokens with a row that the engine did not compute as it is replayed; None unless measured
            and told.
    """

    layer_ids: tuple[int, ...]
    tokens: int
    flips: torch.Tensor | None = None
    flipped: torch.Tensor | None = None
    recomputed: list[int] | None = None
    replayed: torch.Tensor | None = None
    inexact: torch.Tensor | None = None

    def check_recomputed(self, recompute: bool) -> None:
        """Checks after the backward pass that every router read its rows again once with recomputation, never without.

        Args:
            recompute: whether the model computes the activations of all its MoE layers again.

        Raises:
            ReplayError: names the layers, or says that there was no backward pass.
        """
        if not self.layer_ids:
            return
        if self.recomputed is None:
            raise ReplayError("no backward pass came back to this forward pass")
        wanted = int(recompute)
        wrong = {layer: n for layer, n in zip(self.layer_ids, self.recomputed, strict=True) if n != wanted}
        if wrong:
            counts = ", ".join(f"layer {layer}: {count}" for layer, count in wrong.items())
            raise ReplayError(f"every router must run {wanted} times in the backward pass; runs were {counts}")


class Pass:
    """Rows of one forward pass. Activation recompute of that pass reads the same rows again.

    Args:
        layer_ids: global numbers of the model's MoE layers.
        rows: of these layers, in this order; None when the model routes itself.
        measure: count where the live top-k differs.
        record: keep the live top-k.
    """

    def __init__(self, layer_ids: Sequence[int], rows: Rows | None = None, measure: bool = False, record: bool = False):
        self.layer_ids = tuple(layer_ids)
        self.rows = rows
        if rows is not None:
            self._ids = rows.ids.unbind()
            # The same memory: holes are filled in here, which autograd, that keeps the ids of other layers, need not see.
            self._open = rows.ids.data.unbind()
            self._own: list[torch.Tensor | None] = [None] * len(self.layer_ids)
        self.record: list[torch.Tensor | None] | None = [None] * len(self.layer_ids) if record else None
        self.usage = Usage(self.layer_ids, rows.ids.shape[1]) if rows is not None else None
        self.measure = measure
        self.forward = True
        self.calls = [0] * len(self.layer_ids)
        self._place: dict[int, int] = {layer: place for place, layer in enumerate(self.layer_ids)}

    def start_backward(self) -> None:
        """From here on routers are called to recompute activations."""
        self.forward = False
        self.calls = [0] * len(self.layer_ids)
        if self.usage is not None:
            self.usage.recomputed = self.calls

    def check_used(self) -> None:
        """Checks at the end of the forward pass that every router ran once.

        Raises:
            ReplayError: names the layers.
        """
        if self.rows is None:
            return
        wrong = {layer: count for layer, count in zip(self.layer_ids, self.calls, strict=True) if count != 1}
        if wrong:
            counts = ", ".join(f"layer {layer}: {count}" for layer, count in wrong.items())
            raise ReplayError(f"every router must use its routes once in a forward pass; uses were {counts}")

    def top_k(
        self, layer: int, scores: torch.Tensor, live: Callable[..., tuple[torch.Tensor, torch.Tensor]], by_token: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids ``[tokens, top_k]`` of one router.

        Args:
            layer: global number of its layer.
            scores: ``[tokens, experts]``.
            live: computes its own choice, ``live(tokens)`` that for some.
            by_token: whether it can do the latter.
        """
        place = self._place[layer]
        self.calls[place] += 1
        rows = self.rows
        if rows is None:
            chosen = live()
            if self.record is not None and self.forward:
                self.record[place] = chosen[1].detach()
            return chosen
        if self.calls[place] > 1:
            phase = "forward pass" if self.forward else "recomputation"
            raise ReplayError(f"the router of layer {layer} ran twice in one {phase}")
        ids = self._ids[place]
        if scores.shape[0] != ids.shape[0]:
            raise ReplayError(
                f"the router of layer {layer} has {scores.shape[0]} tokens, but {ids.shape[0]} rows were given; "
                "rows must be laid out as this rank's tokens are"
            )
        measure = self.measure and self.forward
        if not measure and by_token and rows.holes is not None:
            # They are few.
            self._open[place].index_copy_(0, rows.holes, live(rows.holes)[1])
        elif measure or rows.live is not None:
            own = live()[1]
            if measure:
                self._own[place] = own
            if rows.live is not None:
                ids = torch.where(rows.live.unsqueeze(1), own, ids)
        # The scores are those of all experts, before any top-k, so that a replayed expert outside it keeps its gradient.
        return scores.gather(1, ids), ids

    def count(self) -> None:
        """Counts what was measured when the forward pass has ended: of all layers at once, which takes fewer operations."""
        usage, rows = self.usage, self.rows
        if usage is None or not self.measure or not self.layer_ids:
            return
        layers, tokens, top_k = rows.ids.shape
        differs = torch.empty((layers, tokens), dtype=torch.bool, device=rows.ids.device)
        at_once = max(1, _COMPARED // max(1, tokens * top_k * top_k))
        for first in range(0, layers, at_once):
            part = slice(first, first + at_once)
            own = torch.stack(self._own[part])
            same = (own.unsqueeze(3) == rows.ids[part].unsqueeze(2)).any(dim=3).all(dim=2)
            torch.logical_not(same, out=differs[part])
        self._own = []
        if rows.valid is not None:
            differs &= rows.valid
        usage.flips, usage.flipped = differs.sum(dim=1), differs.any(dim=0)
        replayed = torch.ones(tokens, dtype=torch.bool, device=differs.device) if rows.valid is None else rows.valid
        usage.replayed = replayed.to(torch.int64) * layers
