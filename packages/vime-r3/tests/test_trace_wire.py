"""The serialized form without the copies that protobuf makes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_proto.version import policy_version
from vime_r3.trace import decode, dumps, encode, loads

V1 = policy_version("run", 0, 1)
MODEL = {"layer_ids": range(4), "experts": 8, "version": V1}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"chunk_rows": 7},
        {"chunk_rows": 7, "chunk_layers": 2},
        {"compression": pb.COMPRESSION_ZSTD, "chunk_rows": 50},
        {"valid": np.arange(300) % 9 != 0},
    ],
)
def test_bytes_are_those_of_the_message(make_ids, more):
    ids = make_ids(300)
    data = dumps(ids, **MODEL, **more)
    trace = encode(ids, **MODEL, **more)
    assert pb.RoutingTrace.FromString(data) == trace
    for source in (data, bytearray(data), memoryview(data), trace.SerializeToString()):
        routes = loads(source, rows=300)
        assert np.array_equal(routes.valid, decode(trace).valid)
        np.testing.assert_array_equal(routes.ids, decode(trace).ids)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_protobuf_reads_the_same_from_any_serialization(data):
    """What `dumps` writes is a message equal to `encode`'s, and `loads` reads whatever is one: fields in any order, a header in
    two parts, a payload given twice."""
    experts, top_k = data.draw(st.sampled_from([(4, 1), (8, 2), (160, 8), (300, 3)]))
    rows, layers = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    ids = rng.random((rows, layers, experts)).argsort(axis=-1)[..., :top_k]
    ids = data.draw(
        st.sampled_from([ids, ids.astype(np.uint16), ids[::-1, :, ::-1].astype(np.int32), np.asfortranarray(ids)])
    )
    model = {
        "layer_ids": np.sort(rng.permutation(20)[:layers]).tolist(),
        "experts": experts,
        "version": V1,
        "valid": rng.random(rows) < data.draw(st.sampled_from([1.0, 0.7])),
        "inexact": [(rows // 2, rows)],
        "chunk_rows": data.draw(st.integers(1, 50)),
        "chunk_layers": data.draw(st.sampled_from([None, 1, 2, 9])),
        "compression": data.draw(st.sampled_from([pb.COMPRESSION_NONE, pb.COMPRESSION_ZSTD])),
    }
    trace, written = encode(ids, **model), dumps(ids, **model)
    assert pb.RoutingTrace.FromString(written) == trace and len(written) == len(trace.SerializeToString())

    payload = pb.RoutingTrace(inline=trace.inline).SerializeToString()
    part = pb.RoutingTraceHeader(chunks=trace.header.chunks)
    rest = pb.RoutingTraceHeader()
    rest.CopyFrom(trace.header)
    rest.ClearField("chunks")
    pieces = [pb.RoutingTrace(header=header).SerializeToString() for header in (rest, part)] + [payload]
    pieces += [payload] * data.draw(st.integers(0, 1))
    other = b"".join(data.draw(st.permutations(pieces)))
    assert pb.RoutingTrace.FromString(other) == trace
    want = decode(trace, rows=rows)
    for source in (written, other):
        routes = loads(source, rows=rows)
        np.testing.assert_array_equal(routes.ids, want.ids)
        np.testing.assert_array_equal(routes.valid, want.valid)
        np.testing.assert_array_equal(routes.exact, want.exact)
    np.testing.assert_array_equal(want.ids[want.valid], ids[want.valid])


def test_a_trace_without_rows():
    data = dumps(np.zeros((0, 4, 2), np.uint8), **MODEL)
    assert loads(data, rows=0).ids.shape == (0, 4, 2)
    # Serializers leave an empty payload out.
    header_only = pb.RoutingTrace(header=pb.RoutingTrace.FromString(data).header, inline=b"")
    assert loads(header_only.SerializeToString()).ids.shape == (0, 4, 2)


def test_routes_are_views_of_the_bytes(make_ids):
    data = dumps(make_ids(64), **MODEL)
    ids = loads(data).ids
    start = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    assert start < ids.__array_interface__["data"][0] < start + len(data) and not ids.flags.writeable


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\x05ab", b"\x08\x01", b"\xff" * 12])
def test_other_bytes_are_refused(data):
    with pytest.raises(ContractError, match="no serialized RoutingTrace"):
        loads(data)


def test_a_payload_that_is_elsewhere_is_refused(make_ids):
    trace = encode(make_ids(5), **MODEL)
    elsewhere = pb.RoutingTrace(header=trace.header, blob_id="blob-1")
    with pytest.raises(ContractError, match="payload: is not inline"):
        loads(elsewhere.SerializeToString())


def test_a_broken_payload_is_refused(make_ids):
    data = bytearray(dumps(make_ids(5), **MODEL))
    data[-1] ^= 1
    with pytest.raises(ContractError, match="checksum"):
        loads(data)
