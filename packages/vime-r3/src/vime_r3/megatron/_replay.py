"""Replay attached to one model: no process-global state, no patch.

``TopKRouter`` asks the object in its ``router_replay`` attribute for its top-k, in the place where it would compute its
own, and goes on with the scores of the ids that it gets: softmax or sigmoid, normalisation and scaling stay Megatron's.
This module puts an object there that knows its model and its global layer number.

Which rows a router reads is decided by the forward pass that it runs in. Activation recompute runs routers again during
the backward pass, possibly after forward passes of other micro-batches: a hook on the output tensor of each forward pass
makes its rows the present ones again when its backward pass begins, whatever the schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from vime_r3.megatron._pass import Pass, ReplayError, Usage
from vime_r3.megatron._routers import find_routers, unwrap
from vime_r3.megatron._rows import inexact_tokens, prepare


class _Slot:
    """Stands in a router's ``router_replay``."""

    def __init__(self, replay: Replay, layer: int):
        self._replay = replay
        self._layer = layer

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """Scores and ids of the experts to use; the signature is that of Megatron's ``RouterReplay``."""

        def live(tokens=None):
            some = scores if tokens is None else scores.detach().index_select(0, tokens)
            return default_compute_topk(some, topk, num_groups=num_groups, group_topk=group_topk)

        current = self._replay._current
        # Megatron's choice by groups of experts takes all tokens of the layer or none.
        return live() if current is None else current.top_k(self._layer, scores, live, by_token=not group_topk)


class Replay:
    """Replay of one model (one virtual pipeline chunk). Made by ``attach``.

    Attributes:
        layer_ids: global numbers, counted from 0, of the MoE layers that this model has; empty for none.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = unwrap(model)
        self._routers = find_routers(self._model)
        self.layer_ids: tuple[int, ...] = tuple(self._routers)
        self._next: Pass | None = None
        self._current: Pass | None = None
        self._inside = False
        self._handles = [
            self._model.register_forward_pre_hook(self._before),
            self._model.register_forward_hook(self._after),
        ]
        for layer, router in self._routers.items():
            router.router_replay = _Slot(self, layer)

    def detach(self) -> None:
        """Takes the replay off the model; routers then route themselves. Calling it again does nothing."""
        for handle in self._handles:
            handle.remove()
        for router in self._routers.values():
            router.router_replay = None
        self._handles, self._routers = [], {}
        self._next = self._current = None

    @contextlib.contextmanager
    def use(
        self,
        ids: np.ndarray | torch.Tensor,
        valid: np.ndarray | torch.Tensor | None = None,
        *,
        layer_ids: Sequence[int] | None = None,
        measure: bool = False,
        exact: np.ndarray | torch.Tensor | None = None,
        unread: np.ndarray | torch.Tensor | None = None,
    ) -> Iterator[Usage]:
        """Replays in the one forward pass that runs inside; its backward pass may run inside or later.

        Args:
            ids: integers ``[tokens, layers, top_k]``, laid out as the tokens that this rank's routers see: the rows of a
                ``[sequence, batch]`` tensor flattened, this rank's part of them under context or sequence parallelism.
            valid: bool ``[tokens]``; tokens that are false route themselves. Default: all are replayed.
            layer_ids: global numbers of the layers of ``ids``; may have more layers than this model. Default: exactly
                this model's.
            measure: count rows that are replayed, and tokens that the trainer alone would have routed otherwise (costs one
                live top-k a layer).
            exact: bool ``[tokens]``, see ``vime_r3.trace.Routes``; counted when measured. Default: nothing is said of it.
            unread: bool ``[tokens]``: tokens whose outputs nothing depends on, such as padding and the last token of a sequence,
                which no other sees and whose prediction nobody asks for. Those of them without a row take experts
                in turn, since a live choice costs each layer four operations. Do not use it where a loss depends on how
                tokens are spread over experts. Default: none.

        Raises:
            ContractError: ids that do not fit the model.
            ReplayError: inside, no or more than one forward pass, a router that ran never or twice, or other tokens.
        """
        self._check_idle()
        layers = self.layer_ids if layer_ids is None else tuple(layer_ids)
        rows = prepare(ids, valid, unread, layers, self._routers, self._device, measure)
        coming = Pass(self.layer_ids, rows, measure=measure)
        if measure and exact is not None:
            coming.usage.inexact = inexact_tokens(exact, valid, len(ids))
        yield from self._run(coming)

    @contextlib.contextmanager
    def record(self) -> Iterator[list[torch.Tensor | None]]:
        """Routes live in the one forward pass inside and keeps the ids: int64 ``[tokens, top_k]`` for each layer."""
        self._check_idle()
        yield from self._run(Pass(self.layer_ids, record=True))

    def _run(self, coming: Pass):
        self._next, self._inside = coming, True
        try:
            yield coming.usage if coming.record is None else coming.record
            if self._next is not None:
                raise ReplayError("routes were given, but the model ran no forward pass")
        finally:
            self._next, self._inside = None, False
            # A forward pass that raised leaves its rows behind.
            if self._current is coming and coming.forward:
                self._current = None

    def _check_idle(self) -> None:
        if not self._handles:
            raise ReplayError("this replay was detached")
        if self._inside:
            raise ReplayError("routes are in use: one forward pass at a time")

    def _before(self, _module, _args) -> None:
        if self._inside and self._next is None:
            raise ReplayError("a second forward pass would use the same routes again: give each its own")
        # A forward pass outside `use` routes itself, and so does its recomputation.
        self._current = self._next or Pass(self.layer_ids)
        self._next = None

    def _after(self, _module, _args, output) -> None:
        done, self._current = self._current, None
        done.check_used()
        done.count()

        def begin(grad: torch.Tensor) -> None:
            done.start_backward()
            self._current = done

        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)

    @property
    def _device(self) -> torch.device | None:
        """Where the routers are; None without any."""
        return next((param.device for router in self._routers.values() for param in router.parameters()), None)


def attach(model: torch.nn.Module) -> Replay:
    """Attaches replay to the ``TopKRouter`` modules of one Megatron model, by global layer number.

    The model may be wrapped (Float16Module, DistributedDataParallel). With virtual pipeline stages attach to each chunk.
    Routers of multi-token prediction are left alone. Until ``use`` is entered the model behaves as before.

    Raises:
        ContractError: a router that would ignore replayed routes (fused, sinkhorn, capacity factor), that is replayed
            already, or two routers of one layer.
    """
    return Replay(model)


def _tensors(output) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in _tensors(item)]
    return []
