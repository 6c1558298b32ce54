"""Rows of a forward pass, checked on the host and sent to the model before the pass begins.

The device has nothing to do meanwhile. What lies on the host is looked at with numpy, in one thread: torch would wake one thread a
core for arrays of this size, and wait for the slowest of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vime_proto.errors import ContractError

Array = np.ndarray | torch.Tensor


@dataclasses.dataclass(frozen=True)
class Rows:
    """What ``Pass`` takes, where the routers are: see there."""

    ids: torch.Tensor
    valid: torch.Tensor | None
    holes: torch.Tensor | None


def prepare(
    ids: Array, valid: Array | None, given: tuple[int, ...], routers: Mapping[int, Any], device: torch.device | None
) -> Rows:
    """Copies of the rows of this model's layers and of the mask, on their way to ``device``.

    Args:
        ids: integers ``[tokens, layers, top_k]``.
        valid: bool ``[tokens]``; default: all.
        given: global numbers of the layers of ``ids``.
        routers: this model's, by global layer number.
        device: where they are; None without any.

    Raises:
        ContractError: ids that do not fit the model. Those that lie on a device are not looked at, which would wait for it.
    """
    ids, valid = _on_host(ids), _on_host(valid)
    _check_shape(ids, given, routers)
    _check_mask("valid", valid, len(ids))
    wanted = tuple(routers)
    if given != wanted:
        ids = ids[:, [given.index(layer) for layer in wanted]]
    pinned = device is not None and device.type == "cuda"
    holes = mask = None
    if isinstance(valid, np.ndarray):
        holes = np.flatnonzero(~valid.astype(bool, copy=False))
        mask = _copied(valid, torch.bool, pinned) if len(holes) else None
    elif valid is not None:
        mask = valid.bool()
    if isinstance(ids, np.ndarray):
        # torch has no full uint16: widen; the copy also detaches from a read-only payload.
        kind = {"|u1": torch.uint8, "<u2": torch.int32}.get(ids.dtype.str, torch.int64)
        rows = _copied(ids, kind, pinned)
        if mask is not None:
            # Rows of holes may hold anything; they must still be readable. They are few.
            rows.numpy()[torch.nonzero(~mask).flatten().cpu().numpy() if holes is None else holes] = 0
        if rows.numel():
            _check_range(rows.numpy(), next(iter(routers.values())).num_experts)
    else:
        rows = ids.clone()
    there = device or rows.device
    places = torch.from_numpy(holes) if holes is not None and mask is not None else None
    # On their way before the forward pass: a copy in its midst would wait for all of it that is queued.
    return Rows(*(None if part is None else part.to(there, non_blocking=True) for part in (rows, mask, places)))


def inexact_tokens(exact: Array, valid: Array | None, tokens: int) -> torch.Tensor:
    """bool ``[tokens]``: those with a row that is not ``exact``.

    Raises:
        ContractError: another shape.
    """
    _check_mask("exact", exact, tokens)
    inexact = ~torch.as_tensor(exact).bool()
    return inexact if valid is None else inexact & torch.as_tensor(valid).bool().to(inexact.device)


def _on_host(given: Array | None) -> Array | None:
    return given.numpy() if isinstance(given, torch.Tensor) and given.device.type == "cpu" else given


def _check_shape(ids: Array, given: tuple[int, ...], routers: Mapping[int, Any]) -> None:
    if ids.ndim != 3 or ids.shape[1] != len(given):
        raise ContractError("ids", f"must be [tokens, {len(given)}, top_k], got {list(ids.shape)}")
    missing = [layer for layer in routers if layer not in given]
    if missing:
        raise ContractError("layer_ids", f"{list(given)} lack layers {missing} of this model")
    for layer, router in routers.items():
        if ids.shape[2] != router.topk:
            raise ContractError("ids", f"have {ids.shape[2]} experts a token, layer {layer} has {router.topk}")


def _check_mask(name: str, given: Array | None, tokens: int) -> None:
    if given is not None and tuple(given.shape) != (tokens,):
        raise ContractError(name, f"must be bool [{tokens}], got {list(given.shape)}")


def _check_range(ids: np.ndarray, experts: int) -> None:
    least, most = (0 if ids.dtype.kind == "u" else int(ids.min())), int(ids.max())
    if not (least >= 0 and most < experts):
        raise ContractError("ids", f"must be in [0, {experts}), got {least} to {most}")


def _copied(given: np.ndarray, kind: torch.dtype, pinned: bool) -> torch.Tensor:
    # Named, since a program may have another default device. Pinned memory is read by a GPU itself, while the host goes on.
    copy = torch.empty(given.shape, dtype=kind, device="cpu", pin_memory=pinned)
    np.copyto(copy.numpy(), given, casting="unsafe")
    return copy
