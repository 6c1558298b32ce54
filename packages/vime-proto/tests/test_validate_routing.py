"""Routing traces: structure of the header."""

import numpy as np
import pytest

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.fakes import build
from vime_proto.validate import validate_trace
from vime_proto.version import policy_version

VERSION = policy_version("run", 0, 0)


def _trace(rows=6, layers=3, top_k=2, experts=8, **options):
    routes = np.zeros((rows, layers, top_k), np.uint16)
    return build.trace(routes, VERSION, experts, **options)


@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("step", [None, 1, 4])
def test_a_trace_has_one_row_less_than_tokens(rows, step):
    validate_trace(_trace(rows, rows_per_chunk=step), tokens=rows + 1)
    with pytest.raises(ContractError, match="tokens - 1"):
        validate_trace(_trace(rows, rows_per_chunk=step), tokens=rows + 2)


@pytest.mark.parametrize(("experts", "size"), [(255, 1), (256, 1), (257, 2), (512, 2)])
def test_ids_take_two_bytes_above_256_experts(experts, size):
    trace = _trace(experts=experts)
    validate_trace(trace)
    assert len(trace.inline) == 6 * 3 * 2 * size
    trace.header.dtype = common.DTYPE_UINT16 if size == 1 else common.DTYPE_UINT8
    with pytest.raises(ContractError, match="experts need"):
        validate_trace(trace)


def test_holes_need_neither_span_nor_chunk():
    trace = _trace(rows_per_chunk=3)
    del trace.header.chunks[1], trace.header.spans[:]
    trace.header.spans.add(rows=common.IndexRange(start=0, stop=3), version=VERSION)
    trace.header.payload_length //= 2
    trace.inline = trace.inline[: trace.header.payload_length]
    with pytest.raises(ContractError, match=r"\[3, 6\]"):
        validate_trace(trace)
    trace.header.holes.add(start=3, stop=6)
    validate_trace(trace)


def _layer_split(trace):
    """The same rows in two chunks of layers."""
    header = trace.header
    chunk = header.chunks[0]
    header.chunks.add().CopyFrom(chunk)
    for one, (start, stop), at in ((header.chunks[0], (0, 1), 0), (header.chunks[1], (1, 3), 12)):
        one.layers.start, one.layers.stop = start, stop
        one.raw_length = 6 * (stop - start) * 2
        one.stored.offset, one.stored.length = at, one.raw_length


def test_chunks_may_cut_by_layers():
    trace = _trace()
    _layer_split(trace)
    validate_trace(trace)
    trace.header.chunks[1].layers.start = 2
    trace.header.chunks[1].raw_length = trace.header.chunks[1].stored.length = 12
    with pytest.raises(ContractError, match=r"layers \[1, 2\) lack rows"):
        validate_trace(trace)


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda t: t.ClearField("header"), "header"),
        (lambda t: t.ClearField("inline"), "payload"),
        (lambda t: setattr(t, "inline", b"x"), "inline"),
        (lambda t: setattr(t.header, "experts", 0), "experts"),
        (lambda t: setattr(t.header, "top_k", 9), "top_k"),
        (lambda t: t.header.ClearField("layer_ids"), "layer_ids"),
        (lambda t: t.header.layer_ids.append(0), "layer_ids"),
        (lambda t: t.header.ClearField("rows"), "rows"),
        (lambda t: t.header.ClearField("payload_length"), "payload_length"),
        (lambda t: t.header.ClearField("spans"), "spans"),
        (lambda t: t.header.spans[0].version.ClearField("number"), "spans[0].version.number"),
        (lambda t: t.header.spans.append(t.header.spans[0]), "spans[1]"),
        (lambda t: t.header.holes.add(start=5, stop=9), "holes[0]"),
        (lambda t: t.header.holes.add(start=3, stop=2), "holes[0]"),
        (lambda t: t.header.chunks.append(t.header.chunks[0]), "chunks"),
        (lambda t: t.header.ClearField("chunks"), "chunks"),
        (lambda t: setattr(t.header.chunks[0], "raw_length", 1), "chunks[0].raw_length"),
        (lambda t: setattr(t.header.chunks[0].stored, "length", 99), "chunks[0].stored"),
        (lambda t: setattr(t.header.chunks[0].rows, "stop", 9), "chunks[0].rows"),
        (lambda t: setattr(t.header.chunks[0].layers, "stop", 4), "chunks[0].layers"),
        (lambda t: t.header.chunks[0].ClearField("compression"), "chunks[0].compression"),
    ],
)
def test_what_is_wrong_is_named(spoil, field):
    trace = _trace()
    spoil(trace)
    with pytest.raises(ContractError) as caught:
        validate_trace(trace)
    assert field in caught.value.violations[0][0]
