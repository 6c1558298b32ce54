"""Samples and blobs come back as they were given, whole or in parts."""

from __future__ import annotations

import numpy as np
import pytest

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.checksum import checksum
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.conformance._calls import DATA_LOSS, INVALID, NOT_FOUND, new_id, refused
from vime_proto.fakes import build
from vime_proto.tensor import to_tensor


def _committed(buffer, change=lambda group: None):
    buffer.ready("a")
    lease = buffer.lease_one()
    group = build.group(lease, buffer.version(0))
    change(group)
    buffer.commit(lease, group)
    return group


def test_a_sample_comes_back_bit_by_bit(buffer):
    def rich(group):
        segment = group.rollouts[0].samples[0].segments[1]
        segment.reward = 0.0
        segment.trainable_mask.CopyFrom(to_tensor(np.array([True, False])))
        segment.streams["entropy"].CopyFrom(build.floats([0.0, 1.5]))
        segment.generation.teacher_logprobs.CopyFrom(build.floats([-0.25, 0.0]))

    group = _committed(buffer, rich)
    for rollout in group.rollouts:
        (answer,) = buffer.fetch(rollout.samples[0].sample_id)
        assert answer.status.code == 0
        assert answer.sample == rollout.samples[0]


def test_unknown_samples_are_reported_and_the_stream_goes_on(buffer):
    group = _committed(buffer)
    known = [rollout.samples[0].sample_id for rollout in group.rollouts]
    answers = buffer.fetch(known[0], "nobody", known[1])
    codes = {answer.sample.sample_id: answer.status.code for answer in answers if answer.status.code == 0}
    assert set(codes) == set(known)
    (bad,) = [answer for answer in answers if answer.status.code != 0]
    assert bad.status.code == NOT_FOUND.value[0] and "nobody" in bad.status.message


@pytest.mark.parametrize(
    ("fields", "tokens", "generation", "streams"),
    [
        ([pb.SAMPLE_FIELD_TOKENS], True, False, False),
        ([pb.SAMPLE_FIELD_GENERATION], False, True, False),
        ([pb.SAMPLE_FIELD_STREAMS], False, False, True),
        ([pb.SAMPLE_FIELD_TOKENS, pb.SAMPLE_FIELD_STREAMS], True, False, True),
    ],
)
def test_only_the_parts_asked_for_travel(buffer, fields, tokens, generation, streams):
    def with_stream(group):
        group.rollouts[0].samples[0].segments[1].streams["x"].CopyFrom(build.floats([1.0, 2.0]))

    group = _committed(buffer, with_stream)
    (answer,) = buffer.fetch(group.rollouts[0].samples[0].sample_id, fields=fields)
    segment = answer.sample.segments[1]
    assert len(answer.sample.segments) == 2
    assert (segment.HasField("token_ids"), segment.HasField("generation"), bool(segment.streams)) == (
        tokens,
        generation,
        streams,
    )


def _routes() -> np.ndarray:
    return (np.arange(4 * 3 * 2) % 7).reshape(4, 3, 2).astype(np.uint8)


def _with_trace(buffer, put=lambda trace: None):
    def change(group):
        trace = build.trace(_routes(), buffer.version(0), experts=8, layer_ids=[1, 2, 4], rows_per_chunk=2)
        put(trace)
        group.rollouts[0].samples[0].routing.CopyFrom(trace)

    return _committed(buffer, change).rollouts[0].samples[0].sample_id


def _decode(trace) -> dict[tuple[int, int], tuple[int, ...]]:
    """Ids by (row, layer number), of rows that are no hole."""
    holes = {row for hole in trace.header.holes for row in range(hole.start, hole.stop)}
    found = {}
    for chunk in trace.header.chunks:
        data = trace.inline[chunk.stored.offset : chunk.stored.offset + chunk.stored.length]
        assert checksum(data) == chunk.checksum
        cube = np.frombuffer(data, np.uint8).reshape(
            chunk.rows.stop - chunk.rows.start, chunk.layers.stop - chunk.layers.start, trace.header.top_k
        )
        for row in range(chunk.rows.start, chunk.rows.stop):
            for position in range(chunk.layers.start, chunk.layers.stop):
                if row not in holes:
                    key = row, trace.header.layer_ids[position]
                    assert key not in found, "covered twice"
                    found[key] = tuple(cube[row - chunk.rows.start, position - chunk.layers.start].tolist())
    return found


def _expected(rows, layers) -> dict[tuple[int, int], tuple[int, ...]]:
    routes = _routes()
    return {(r, n): tuple(routes[r, p].tolist()) for r in rows for p, n in enumerate([1, 2, 4]) if n in layers}


def test_a_trace_comes_back_whole(buffer):
    (answer,) = buffer.fetch(_with_trace(buffer), fields=[pb.SAMPLE_FIELD_ROUTING])
    assert _decode(answer.sample.routing) == _expected(range(4), {1, 2, 4})


def test_a_trace_is_served_by_rows_and_layers(buffer):
    sample_id = _with_trace(buffer)
    rows = [common.IndexRange(start=1, stop=2), common.IndexRange(start=3, stop=4)]
    selection = pb.SampleSelection(sample_id=sample_id, routing_rows=rows)
    (answer,) = buffer.fetch(selection, routing_layers=common.IndexRange(start=2, stop=5))
    assert answer.status.code == 0
    got = _decode(answer.sample.routing)
    wanted = _expected([1, 3], {2, 4})
    assert {key: value for key, value in got.items() if key in wanted} == wanted
    assert answer.sample.routing.header.rows == 4
    assert not any(row in (0, 2) for row, _ in got), "rows that were not asked for are holes"


def test_a_hole_stays_one_in_a_part_of_a_trace(buffer):
    """A chunk may cover it all the same, with bytes that say nothing."""
    sample_id = _with_trace(buffer, lambda trace: trace.header.holes.add(start=1, stop=2))
    selection = pb.SampleSelection(sample_id=sample_id, routing_rows=[common.IndexRange(start=0, stop=3)])
    (answer,) = buffer.fetch(selection, routing_layers=common.IndexRange(start=1, stop=3))
    assert _decode(answer.sample.routing) == _expected([0, 2], {1, 2})


def test_the_index_states_bytes_of_the_trace(buffer):
    _with_trace(buffer)
    entries = [rollout.samples[0] for rollout in buffer.granted_batch().groups[0].rollouts]
    assert [entry.routing_bytes for entry in entries] == [_routes().size, 0]
    assert all(entry.bytes > 0 for entry in entries)


def _put_blob(buffer, data: bytes, request_id: str, parts: int = 3, total=None):
    size = max(1, -(-len(data) // parts))
    messages = [pb.PutBlobRequest(data=data[at : at + size]) for at in range(0, max(len(data), 1), size)]
    messages[0].run_id, messages[0].request_id = buffer.run_id, request_id
    messages[-1].checksum.CopyFrom(total or checksum(data))
    return buffer.stub.PutBlob(iter(messages), timeout=buffer.timeout)


def _get_blob(buffer, blob_id: str, *ranges: tuple[int, int]) -> bytes:
    request = [common.ByteRange(offset=offset, length=length) for offset, length in ranges]
    return b"".join(part.data for part in buffer.call("GetBlob", pb.GetBlobRequest, blob_id=blob_id, ranges=request))


def test_a_blob_comes_back_whole_and_in_ranges(buffer):
    buffer.open()
    data = bytes(range(256)) * 20
    put = _put_blob(buffer, data, new_id())
    assert put.length == len(data)
    assert _get_blob(buffer, put.blob_id) == data
    assert _get_blob(buffer, put.blob_id, (300, 5), (0, 2), (7, 0)) == data[300:305] + data[:2]


def test_a_blob_is_stored_once(buffer):
    buffer.open()
    request_id = new_id()
    first = _put_blob(buffer, b"abc", request_id)
    assert _put_blob(buffer, b"abc", request_id) == first
    with refused(INVALID, names=request_id):
        _put_blob(buffer, b"abd", request_id)


def test_a_blob_with_a_wrong_checksum_is_refused(buffer):
    buffer.open()
    with refused(INVALID, DATA_LOSS):
        _put_blob(buffer, b"abc", new_id(), total=checksum(b"abd"))


def test_an_unknown_blob_is_named(buffer):
    buffer.open()
    with refused(NOT_FOUND, names="nobody"):
        _get_blob(buffer, "nobody")


def test_a_trace_may_lie_in_a_blob(buffer):
    def put(trace):
        blob = _put_blob(buffer, trace.inline, new_id())
        trace.blob_id = blob.blob_id

    sample_id = _with_trace(buffer, put)
    (answer,) = buffer.fetch(sample_id)
    assert answer.sample.routing.WhichOneof("payload") == "inline", "the answer's payload is inline"
    assert _decode(answer.sample.routing) == _expected(range(4), {1, 2, 4})


def test_an_unknown_field_is_refused(buffer):
    buffer.open()
    with refused(INVALID, field="fields"):
        buffer.fetch("x", fields=[99])
