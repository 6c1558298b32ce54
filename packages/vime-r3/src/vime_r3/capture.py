"""Routes as an inference engine returns them, validated and made a trace. Imports no engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_r3.trace import encode
from vime_r3.trace._header import check_shape, id_dtype

__all__ = ["from_vllm"]

Captured = np.ndarray | Sequence[np.ndarray | None] | None
# The weights of every row, or (first generated token, weights) for a request that went on under newer weights.
Versions = common.PolicyVersion | Sequence[tuple[int, common.PolicyVersion]]


def from_vllm(
    routed_experts: Captured,
    *,
    moe_layer_ids: Sequence[int],
    experts: int,
    top_k: int,
    version: Versions,
    prompt_tokens: int,
    generated_tokens: int,
    start_row: int = 0,
    first_row: int = 0,
    chunk_rows: int = 1024,
    chunk_layers: int | None = None,
    compression: int = pb.COMPRESSION_NONE,
) -> pb.RoutingTrace:
    """The trace of rows ``[start_row, prompt + generated - 1)`` of one vLLM request.

    vLLM's array has all decoder layers, dense ones filled with zeros; only ``moe_layer_ids`` are kept. A missing row (no
    array, rows not returned, a row that is zero in every MoE layer) becomes a hole, never expert 0.

    Args:
        routed_experts: integers ``[rows, layers, top_k]``, where row i routes token ``first_row + i``; or its prompt part
            and its generation part, which follow one another (a part may be None when it has no rows); or None when the
            request ended before anything was captured.
        moe_layer_ids: global numbers of the MoE layers, ascending, from the model's config.
        experts: routed experts of a layer.
        top_k: experts of a token.
        version: the weights under which every row was computed; or, for a request that was kept across updates, the first
            generated token of each weights, from 0 on. A token's row is computed when the token is read, so the last token
            before an update is read under the new weights. From there on rows are marked inexact: the engine computed what
            precedes them again, and its first rows stay.
        prompt_tokens: tokens of the prompt, at least 1.
        generated_tokens: tokens returned; 0 for a request that only reads its prompt.
        start_row: first row wanted; earlier ones are dropped. Row 0 of the trace is this row.
        first_row: token that row 0 of the array routes; more than 0 when cached tokens were not captured, or when the
            request asked for its rows from there on (vLLM's ``routed_experts_prompt_start``).
        chunk_rows: as in ``encode``.
        chunk_layers: as in ``encode``.
        compression: as in ``encode``.

    Raises:
        ContractError: more rows than tokens - 1, another top-k, layers that are not in the array or hold only zeros
            (the capture is off, or the layer is dense), ids that are out of range or twice in a row.
    """
    layers = check_shape(experts, top_k, moe_layer_ids)
    if prompt_tokens < 1 or generated_tokens < 0:
        raise ContractError(
            "prompt_tokens", f"{prompt_tokens} prompt and {generated_tokens} generated tokens are no request"
        )
    rows = prompt_tokens + generated_tokens - 1
    if not 0 <= start_row <= rows:
        raise ContractError("start_row", f"must be in [0, {rows}], got {start_row}")
    ids = np.zeros((rows, len(layers), top_k), dtype=id_dtype(experts)[0])
    valid = np.zeros(rows, dtype=np.bool_)
    captured = _one_array(routed_experts)
    if captured is not None and len(captured):
        last = first_row + len(captured)
        if first_row < 0 or last > rows:
            tokens = f"{prompt_tokens} prompt + {generated_tokens} generated tokens"
            raise ContractError(
                "routed_experts", f"rows [{first_row}, {last}) for {tokens}: must lie within [0, {rows}) (tokens - 1)"
            )
        wanted = _moe_layers(captured, layers, top_k, experts)
        present = _any_of_each_row(wanted) if top_k > 1 else np.ones(len(wanted), dtype=np.bool_)
        if not present.any():
            raise ContractError(
                "routed_experts", f"all layers {list(layers)} hold only zeros: routes were not captured"
            )
        ids[first_row:last] = wanted
        valid[first_row:last] = present
    spans = _spans(version, prompt_tokens, generated_tokens, start_row)
    return encode(
        ids[start_row:],
        layer_ids=layers,
        experts=experts,
        version=spans,
        inexact=[(start, stop) for start, stop, _ in spans[1:]],
        valid=None if valid[start_row:].all() else valid[start_row:],
        chunk_rows=chunk_rows,
        chunk_layers=chunk_layers,
        compression=compression,
    )


def _spans(
    version: Versions, prompt_tokens: int, generated_tokens: int, start_row: int
) -> list[tuple[int, int, common.PolicyVersion]]:
    """Rows of each weights, counted from ``start_row``."""
    given = [(0, version)] if isinstance(version, common.PolicyVersion) else list(version)
    firsts = [first for first, _ in given]
    if not firsts or firsts[0] != 0 or any(a >= b for a, b in itertools.pairwise(firsts)):
        raise ContractError("version", f"first tokens must ascend from 0, got {firsts}")
    if firsts[-1] > max(generated_tokens - 1, 0):
        raise ContractError("version", f"token {firsts[-1]} is not among {generated_tokens} generated tokens")
    rows = prompt_tokens + generated_tokens - 1
    edges = [0, *(prompt_tokens + first - 1 for first in firsts[1:]), rows]
    moved = [max(edge - start_row, 0) for edge in edges]
    return [(low, high, weights) for low, high, (_, weights) in zip(moved, moved[1:], given, strict=False)]


def _one_array(routed_experts: Captured) -> np.ndarray | None:
    if routed_experts is None or isinstance(routed_experts, np.ndarray):
        return routed_experts
    parts = [np.asarray(part) for part in routed_experts if part is not None and len(part)]
    for index, part in enumerate(parts[1:], 1):
        if part.shape[1:] != parts[0].shape[1:]:
            raise ContractError(
                f"routed_experts[{index}]", f"is {list(part.shape)}, the part before {list(parts[0].shape)}"
            )
    return np.concatenate(parts) if parts else None


def _moe_layers(captured: np.ndarray, layers: tuple[int, ...], top_k: int, experts: int) -> np.ndarray:
    if captured.ndim != 3 or captured.dtype.kind not in "iu":
        raise ContractError(
            "routed_experts", f"must be integers [rows, layers, top_k], got {captured.dtype} {list(captured.shape)}"
        )
    if captured.shape[2] != top_k:
        raise ContractError("routed_experts", f"has {captured.shape[2]} experts a token, the model has {top_k}")
    if layers[-1] >= captured.shape[1]:
        raise ContractError("moe_layer_ids", f"{layers[-1]} is no layer of an array of {captured.shape[1]} layers")
    first, last = layers[0], layers[-1]
    # Layers without a gap are looked at where they lie, not copied.
    wanted = captured[:, first : last + 1] if last - first + 1 == len(layers) else captured[:, list(layers)]
    # Before ids are narrowed: 300 would become 44.
    if wanted.dtype.kind == "i" and int(wanted.min()) < 0 or int(wanted.max()) >= experts:
        row, layer, _ = np.argwhere((wanted < 0) | (wanted >= experts))[0]
        raise ContractError(
            "routed_experts",
            f"row {row}, layer {layers[layer]}: {wanted[row, layer].tolist()} are not in [0, {experts})",
        )
    return wanted


def _any_of_each_row(ids: np.ndarray) -> np.ndarray:
    """Whether a row has an id other than 0, bool [rows]; numpy's ``any`` looks at single bytes, and takes ten times as long."""
    flat = ids.reshape(len(ids), -1)
    width = 8 // flat.itemsize
    if flat.shape[1] % width == 0 and flat.flags.c_contiguous:
        flat = flat.view(np.uint64)
    return np.bitwise_or.reduce(flat, axis=1) != 0
