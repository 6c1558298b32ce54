"""Routing traces: the structure of the header. What the ids say is checked where they are decoded."""

from __future__ import annotations

import itertools

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_proto.validate import _fields as fields

_SIZE = {common.DTYPE_UINT8: 1, common.DTYPE_UINT16: 2}


def validate_trace(trace: pb.RoutingTrace, field: str = "routing", tokens: int | None = None) -> None:
    """Checks header and payload of a trace.

    Args:
        trace: the message.
        field: how errors name it.
        tokens: tokens of the sample: the trace must have one row less.

    Raises:
        ContractError: names the field.
    """
    if not trace.HasField("header"):
        raise ContractError(f"{field}.header", "must be set")
    validate_trace_header(trace.header, f"{field}.header", tokens)
    kind = trace.WhichOneof("payload")
    if kind is None:
        raise ContractError(f"{field}.payload", "one of inline, blob_id, uri must be set")
    if kind == "inline" and len(trace.inline) != trace.header.payload_length:
        raise ContractError(
            f"{field}.inline", f"holds {len(trace.inline)} bytes, the header states {trace.header.payload_length}"
        )
    if kind != "inline":
        fields.text(getattr(trace, kind), f"{field}.{kind}")


def validate_trace_header(header: pb.RoutingTraceHeader, field: str = "header", tokens: int | None = None) -> None:
    """Checks a header: shapes, dtype, ranges in bounds, chunks that cover every row that is no hole once for every layer.

    Raises:
        ContractError: names the field.
    """
    fields.at_least(header.experts, 1, f"{field}.experts")
    if not 1 <= header.top_k <= header.experts:
        raise ContractError(f"{field}.top_k", f"must be in [1, {header.experts}], got {header.top_k}")
    wanted = common.DTYPE_UINT8 if header.experts <= 256 else common.DTYPE_UINT16
    if header.dtype != wanted:
        raise ContractError(f"{field}.dtype", f"{header.experts} experts need {common.Dtype.Name(wanted)}")
    layers = list(header.layer_ids)
    if not layers or any(low >= high for low, high in itertools.pairwise(layers)):
        raise ContractError(f"{field}.layer_ids", f"must be ascending and not empty, got {layers}")
    rows = fields.present(header, "rows", f"{field}.")
    if tokens is not None and rows != max(tokens - 1, 0):
        raise ContractError(f"{field}.rows", f"must be tokens - 1 = {max(tokens - 1, 0)}, got {rows}")
    payload = fields.present(header, "payload_length", f"{field}.")
    holes = _disjoint(header.holes, f"{field}.holes", rows)
    _disjoint(header.inexact, f"{field}.inexact", rows)
    needed = _subtract([(0, rows)] if rows else [], holes)
    spans = _disjoint((span.rows for span in header.spans), f"{field}.spans", rows)
    for index, span in enumerate(header.spans):
        fields.version(span, "version", f"{field}.spans[{index}].version")
    missing = _subtract(needed, spans)
    if missing:
        raise ContractError(f"{field}.spans", f"rows {list(missing[0])} are neither in a span nor a hole")
    _chunks(header, f"{field}.chunks", rows, payload, needed)


def _disjoint(ranges, field: str, rows: int) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for index, one in enumerate(ranges):
        start, stop = fields.index_range(one, f"{field}[{index}]", rows)
        if result and start < result[-1][1]:
            raise ContractError(f"{field}[{index}]", "ranges must be ascending and disjoint")
        result.append((start, stop))
    return result


def _subtract(ranges: list[tuple[int, int]], holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges without the holes; both ascending and disjoint."""
    result = []
    for start, stop in ranges:
        for low, high in holes:
            if high <= start or low >= stop or low == high:
                continue
            if start < low:
                result.append((start, low))
            start = max(start, high)
        if start < stop:
            result.append((start, stop))
    return result


def _chunks(header: pb.RoutingTraceHeader, field: str, rows: int, payload: int, needed: list[tuple[int, int]]) -> None:
    per_layer: dict[tuple[int, int], list[tuple[int, int]]] = {}
    stored: list[tuple[int, int]] = []
    for index, chunk in enumerate(header.chunks):
        name = f"{field}[{index}]"
        start, stop = fields.index_range(chunk.rows, f"{name}.rows", rows)
        layer, layer_stop = fields.index_range(chunk.layers, f"{name}.layers", len(header.layer_ids))
        stored.append(fields.byte_range(chunk.stored, f"{name}.stored", payload))
        raw = (stop - start) * (layer_stop - layer) * header.top_k * _SIZE[header.dtype]
        if fields.present(chunk, "raw_length", f"{name}.") != raw:
            raise ContractError(
                f"{name}.raw_length", f"rows x layers x top_k x id size = {raw}, got {chunk.raw_length}"
            )
        if chunk.compression not in (pb.COMPRESSION_NONE, pb.COMPRESSION_ZSTD):
            raise ContractError(f"{name}.compression", "must be NONE or ZSTD")
        if chunk.compression == pb.COMPRESSION_NONE and chunk.stored.length != raw:
            raise ContractError(f"{name}.stored.length", f"uncompressed bytes must be {raw}, got {chunk.stored.length}")
        if start < stop and layer < layer_stop:
            per_layer.setdefault((layer, layer_stop), []).append((start, stop))
    _no_overlap(sorted(stored), f"{field}.stored", "stored bytes of two chunks overlap")
    # Cuts by layer, so that coverage is checked per band of layers and not per layer.
    edges = sorted({0, len(header.layer_ids), *(edge for band in per_layer for edge in band)})
    for low, high in itertools.pairwise(edges):
        covered = sorted(r for band, ranges in per_layer.items() if band[0] <= low and high <= band[1] for r in ranges)
        _no_overlap(covered, field, f"layers [{low}, {high}) hold some rows twice")
        missing = _subtract(needed, covered)
        if missing:
            raise ContractError(field, f"layers [{low}, {high}) lack rows {list(missing[0])}, which are no hole")


def _no_overlap(ranges: list[tuple[int, int]], field: str, message: str) -> None:
    ranges = [one for one in ranges if one[0] != one[1]]
    if any(after[0] < before[1] for before, after in itertools.pairwise(ranges)):
        raise ContractError(field, message)
