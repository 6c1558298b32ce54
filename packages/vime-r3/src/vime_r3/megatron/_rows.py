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
    """Rows where the routers are.

    Attributes:
        ids: int64 ``[layers, tokens, top_k]``.
        valid: bool ``[tokens]``: tokens that have a row; None when all have one, or when nobody asks.
        live: bool ``[tokens]``: tokens that route themselves; None when none does, or when nobody asks.
        holes: int64: the same tokens; None when none does, or when they are not known without waiting for a device.
    """

    ids: torch.Tensor
    valid: torch.Tensor | None = None
    live: torch.Tensor | None = None
    holes: torch.Tensor | None = None


def prepare(
    ids: Array,
    valid: Array | None,
    unread: Array | None,
    given: tuple[int, ...],
    routers: Mapping[int, Any],
    device: torch.device | None,
    measure: bool = False,
) -> Rows:
    """Copies of the rows of this model's layers, on their way to ``device``.

    Args:
        ids: integers ``[tokens, layers, top_k]``.
        valid: bool ``[tokens]``; default: all.
        unread: bool ``[tokens]``, see ``Replay.use``.
        given: global numbers of the layers of ``ids``.
        routers: this model's, by global layer number.
        device: where they are; None without any.
        measure: whether masks are asked for.

    Raises:
        ContractError: ids that do not fit the model. Those that lie on a device are not looked at, which would wait for it.
    """
    if isinstance(ids, torch.Tensor) and ids.device.type == "cpu":
        ids = ids.numpy()
    _check_shape(ids, given, routers)
    _check_mask("valid", valid, len(ids))
    _check_mask("unread", unread, len(ids))
    wanted = tuple(routers)
    if given != wanted:
        ids = ids[:, [given.index(layer) for layer in wanted]]
    # Megatron's choice by groups of experts takes all tokens of a layer.
    measure = measure or any(router.config.moe_router_group_topk for router in routers.values())
    there = device or (ids.device if isinstance(ids, torch.Tensor) else torch.device("cpu"))
    if isinstance(ids, np.ndarray):
        rows, *masks = _from_host(ids, _host_mask(valid), _host_mask(unread), routers, there, measure)
    else:
        there_too = (None if one is None else torch.as_tensor(one).to(there) for one in (ids, valid, unread))
        rows, *masks = _from_device(*there_too, _experts(routers))
    # By layer, and as the gate's gather wants them: once, not in each layer.
    by_layer = torch.empty((rows.shape[1], rows.shape[0], rows.shape[2]), dtype=torch.int64, device=there)
    return Rows(by_layer.copy_(rows.transpose(0, 1)), *masks)


def _from_host(
    ids: np.ndarray,
    valid: np.ndarray | None,
    unread: np.ndarray | None,
    routers: Mapping[int, Any],
    there: torch.device,
    measure: bool,
) -> tuple[torch.Tensor | None, ...]:
    missing = np.zeros(0, np.int64) if valid is None else np.flatnonzero(~valid)
    # Without any row a pass is the model alone, to the last bit: where a token goes decides which ones are multiplied with it.
    spare = unread is not None and len(missing) < len(ids)
    holes = missing[~unread[missing]] if spare else missing
    pinned = there.type == "cuda"
    # torch has no full uint16: widen; the copy also detaches from a read-only payload.
    rows = _copied(ids, {"|u1": torch.uint8, "<u2": torch.int32}.get(ids.dtype.str, torch.int64), pinned)
    # What has no row may hold anything, and must be readable. These are few.
    experts = _experts(routers)
    rows.numpy()[missing] = _filler(np.arange(len(missing)), ids.shape[2], experts)[:, None]
    if rows.numel():
        _check_range(rows.numpy(), experts)
    live = np.zeros(len(ids), dtype=np.bool_)
    live[holes] = True
    parts = (
        rows,
        _copied(valid, torch.bool, pinned) if measure and len(missing) else None,
        _copied(live, torch.bool, pinned) if measure and len(holes) else None,
        torch.from_numpy(holes) if len(holes) else None,
    )
    # On their way before the forward pass: a copy in its midst would wait for all of it that is queued.
    return tuple(None if part is None else part.to(there, non_blocking=True) for part in parts)


def _from_device(
    ids: torch.Tensor, valid: torch.Tensor | None, unread: torch.Tensor | None, experts: int
) -> tuple[torch.Tensor | None, ...]:
    if valid is None:
        return ids, None, None, None
    valid = valid.bool()
    filler = _filler((~valid).cumsum(0) - 1, ids.shape[2], experts).to(ids.dtype)
    rows = torch.where(valid[:, None, None], ids, filler[:, None])
    return rows, valid, ~valid if unread is None else ~(valid | unread.bool()), None


def _experts(routers: Mapping[int, Any]) -> int:
    return next((router.num_experts for router in routers.values()), 1)


def _filler(number: Any, top_k: int, experts: int) -> Any:
    """Experts ``[tokens, top_k]`` of tokens that nobody reads, by their number: different ones, and all experts equally often."""
    arange = np.arange(top_k) if isinstance(number, np.ndarray) else torch.arange(top_k, device=number.device)
    return (number[:, None] * top_k + arange) % experts


def inexact_tokens(exact: Array, valid: Array | None, tokens: int) -> torch.Tensor:
    """bool ``[tokens]``: those with a row that is not ``exact``.

    Raises:
        ContractError: another shape.
    """
    _check_mask("exact", exact, tokens)
    inexact = ~torch.as_tensor(exact).bool()
    return inexact if valid is None else inexact & torch.as_tensor(valid).bool().to(inexact.device)


def _host_mask(given: Array | None) -> np.ndarray | None:
    if isinstance(given, torch.Tensor):
        given = given.cpu().numpy()
    return None if given is None else given.astype(np.bool_, copy=False)


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
