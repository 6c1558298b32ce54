"""Traces one after the other: turns of a conversation, requests that go on after a weight update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_proto.version import show
from vime_r3.trace import _ranges
from vime_r3.trace._header import Shape, check_header
from vime_r3.trace._ranges import Range
from vime_r3.trace._select import select


def concatenate(traces: Sequence[pb.RoutingTrace]) -> pb.RoutingTrace:
    """Rows of several traces one after the other; stored bytes are joined as they are.

    Raises:
        ContractError: no trace, traces of different models, or a payload that is not inline.
    """
    if not traces:
        raise ContractError("traces", "must not be empty")
    shapes = [check_header(trace.header, f"traces[{index}].header") for index, trace in enumerate(traces)]
    first = shapes[0]
    header = pb.RoutingTraceHeader(
        experts=first.experts, top_k=first.top_k, layer_ids=first.layer_ids, dtype=traces[0].header.dtype
    )
    row, offset = 0, 0
    for index, (trace, shape) in enumerate(zip(traces, shapes, strict=True)):
        _check_same(first, shape, f"traces[{index}].header")
        if len(trace.inline) != trace.header.payload_length:
            raise ContractError(f"traces[{index}].payload", f"must be inline, {trace.header.payload_length} bytes")
        for target, ranges in ((header.holes, trace.header.holes), (header.inexact, trace.header.inexact)):
            target.extend(_ranges.to_messages([(r.start + row, r.stop + row) for r in ranges]))
        for span in trace.header.spans:
            rows = common.IndexRange(start=span.rows.start + row, stop=span.rows.stop + row)
            header.spans.add(rows=rows, version=span.version)
        for chunk in trace.header.chunks:
            new = header.chunks.add()
            new.CopyFrom(chunk)
            new.rows.start += row
            new.rows.stop += row
            new.stored.offset += offset
        row, offset = row + shape.rows, offset + trace.header.payload_length
    header.rows = row
    header.payload_length = offset
    for field in (header.holes, header.inexact):
        merged = _ranges.to_messages(_ranges.merge([(r.start, r.stop) for r in field]))
        del field[:]
        field.extend(merged)
    return pb.RoutingTrace(header=header, inline=b"".join(trace.inline for trace in traces))


def pad(trace: pb.RoutingTrace, rows: int) -> pb.RoutingTrace:
    """The trace with holes added at its end until it has ``rows`` rows.

    Raises:
        ContractError: it has more.
    """
    have = check_header(trace.header).rows
    if have > rows:
        raise ContractError("rows", f"the trace has {have} rows, more than {rows}: truncate it")
    padded = pb.RoutingTrace()
    padded.CopyFrom(trace)
    padded.header.rows = rows
    holes = _ranges.merge([*((hole.start, hole.stop) for hole in trace.header.holes), (have, rows)])
    del padded.header.holes[:]
    padded.header.holes.extend(_ranges.to_messages(holes))
    return padded


def remark(trace: pb.RoutingTrace, inexact: Iterable[Range]) -> pb.RoutingTrace:
    """The trace with further row ranges marked as not exactly replayable."""
    marked = pb.RoutingTrace()
    marked.CopyFrom(trace)
    merged = _ranges.merge([*((r.start, r.stop) for r in trace.header.inexact), *inexact])
    del marked.header.inexact[:]
    marked.header.inexact.extend(_ranges.to_messages(merged))
    check_header(marked.header)
    return marked


def extend(trace: pb.RoutingTrace, addition: pb.RoutingTrace, start_row: int = 0) -> pb.RoutingTrace:
    """A sample's trace continued by the trace of its next request, whose row 0 is ``start_row`` of the sample.

    Under the same policy version the first rows win: rows that both have are those of ``trace`` (holes of ``trace`` are
    filled). Under a newer version the engine has recomputed everything, so the rows of ``addition`` replace those of
    ``trace``, and what was sampled before cannot be replayed exactly any more: rows of ``trace`` are marked inexact. If
    the addition does not begin at row 0, the kept rows are of the old version and it is the addition that is marked.
    Rows that neither has are holes.

    Args:
        trace: the rows so far, inline.
        addition: the rows of the next request, inline.
        start_row: the sample's row that is row 0 of ``addition`` (``GenerateRequest.routing_start_row``).

    Raises:
        ContractError: different models, another run, or an addition of an older version.
    """
    old, new = check_header(trace.header, "trace.header"), check_header(addition.header, "addition.header")
    _check_same(old, new, "addition.header")
    stop_row = start_row + new.rows
    rows = max(old.rows, stop_row)
    newer = _is_newer(trace.header, addition.header)
    if newer and start_row == 0:
        return remark(pad(addition, rows), [(0, old.rows)])
    if newer:
        kept = pad(select(trace, rows=(0, min(start_row, old.rows))), start_row)
        return remark(pad(concatenate([kept, addition]), rows), [(start_row, rows)])
    # Between two edges the rows are all held, all to be taken from the addition, or all missing.
    held = old.filled
    edges = sorted({0, rows, start_row, stop_row, *(edge for pair in held for edge in pair)})
    parts = []
    for low, high in zip(edges, edges[1:], strict=False):
        if any(start <= low and high <= stop for start, stop in held):
            parts.append(select(trace, rows=(low, high)))
        elif start_row <= low and high <= stop_row:
            parts.append(select(addition, rows=(low - start_row, high - start_row)))
        else:
            parts.append(pad(select(trace, rows=(0, 0)), high - low))
    return concatenate(parts) if parts else trace


def _check_same(first: Shape, other: Shape, field: str) -> None:
    for name in ("experts", "top_k", "layer_ids"):
        want, got = getattr(first, name), getattr(other, name)
        if want != got:
            raise ContractError(f"{field}.{name}", f"must be {want} as in the trace before, got {got}")


def _is_newer(old: pb.RoutingTraceHeader, new: pb.RoutingTraceHeader) -> bool:
    """Whether any row so far is of older weights than the addition, whose engine then recomputed it."""
    if not (old.spans and new.spans):
        return False
    first = new.spans[0].version
    ages = {(span.version.lineage, span.version.number): span.version for span in old.spans}
    for version in ages.values():
        if version.run_id != first.run_id:
            raise ContractError("addition.header.spans", f"{show(first)} is of another run than {show(version)}")
    last = ages[max(ages)]
    if (first.lineage, first.number) < (last.lineage, last.number):
        raise ContractError("addition.header.spans", f"{show(first)} is older than {show(last)} of the trace")
    return (first.lineage, first.number) > min(ages)
