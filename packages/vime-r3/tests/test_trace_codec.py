import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_proto.version import policy_version
from vime_r3.trace import byte_ranges, check_header, decode, encode, hole_count, select, truncate

V1 = policy_version("run", 0, 1)


@st.composite
def encoded(draw):
    """ids, valid, layer ids, experts and a trace of them."""
    experts, top_k = draw(st.sampled_from([(4, 1), (8, 2), (160, 8), (300, 3)]))
    rows, layers = draw(st.integers(0, 40)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    ids = rng.random((rows, layers, experts)).argsort(axis=-1)[..., :top_k]
    valid = rng.random(rows) < draw(st.sampled_from([1.0, 0.7, 0.0]))
    numbers = np.sort(rng.permutation(20)[:layers]).tolist()
    trace = encode(
        ids,
        layer_ids=numbers,
        experts=experts,
        version=V1,
        valid=valid,
        chunk_rows=draw(st.integers(1, 50)),
        chunk_layers=draw(st.sampled_from([None, 1, 2])),
        compression=draw(st.sampled_from([pb.COMPRESSION_NONE, pb.COMPRESSION_ZSTD])),
    )
    return ids, valid, numbers, experts, trace


@settings(max_examples=150, deadline=None)
@given(encoded(), st.data())
def test_round_trip_and_any_part(case, data):
    ids, valid, numbers, experts, trace = case
    routes = decode(pb.RoutingTrace.FromString(trace.SerializeToString()), rows=len(ids))
    assert routes.layer_ids == tuple(numbers) and routes.experts == experts
    assert routes.ids.dtype == (np.uint8 if experts <= 256 else np.uint16)
    np.testing.assert_array_equal(routes.valid, valid)
    np.testing.assert_array_equal(routes.ids[valid], ids[valid])
    assert hole_count(trace.header) == int((~valid).sum())
    start = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(start, len(ids)))
    left = data.draw(st.integers(0, len(numbers) - 1))
    right = data.draw(st.integers(left + 1, len(numbers)))
    part = decode(select(trace, rows=(start, stop), layer_ids=numbers[left:right]), rows=stop - start)
    np.testing.assert_array_equal(part.valid, valid[start:stop])
    np.testing.assert_array_equal(part.ids[part.valid], ids[start:stop, left:right][valid[start:stop]])


def test_ids_are_one_byte_up_to_256_experts_and_two_above(make_ids):
    assert (
        encode(make_ids(5, experts=256), layer_ids=range(4), experts=256, version=V1).header.dtype == common.DTYPE_UINT8
    )
    wide = encode(make_ids(5, experts=257), layer_ids=range(4), experts=257, version=V1)
    assert wide.header.dtype == common.DTYPE_UINT16 and wide.header.payload_length == 5 * 4 * 2 * 2


def test_whole_row_chunks_decode_without_a_copy(make_ids):
    routes = decode(encode(make_ids(100), layer_ids=range(4), experts=8, version=V1, chunk_rows=7))
    assert not routes.ids.flags.owndata and not routes.ids.flags.writeable


def test_chunks_may_come_in_any_order(make_ids):
    ids = make_ids(30)
    trace = encode(ids, layer_ids=range(4), experts=8, version=V1, chunk_rows=7)
    shuffled = pb.RoutingTrace()
    shuffled.CopyFrom(trace)
    del shuffled.header.chunks[:]
    shuffled.header.chunks.extend(trace.header.chunks[index] for index in (3, 0, 4, 2, 1))
    np.testing.assert_array_equal(decode(shuffled).ids, ids)
    # Another order of the payload: the first chunk's rows are stored last.
    moved = pb.RoutingTrace(header=trace.header, inline=trace.inline[56:] + trace.inline[:56])
    for chunk in moved.header.chunks:
        chunk.stored.offset = (chunk.stored.offset - 56) % len(moved.inline)
    np.testing.assert_array_equal(decode(moved).ids, ids)


def test_holes_are_masked_and_their_ids_never_leave(make_ids):
    ids = make_ids(6)
    valid = np.array([True, False, False, True, True, False])
    ids[~valid] = 255  # what an engine leaves in padded rows
    trace = encode(ids, layer_ids=range(4), experts=8, version=V1, valid=valid)
    assert [(hole.start, hole.stop) for hole in trace.header.holes] == [(1, 3), (5, 6)]
    assert [(span.rows.start, span.rows.stop) for span in trace.header.spans] == [(0, 1), (3, 5)]
    assert not decode(trace).ids[~valid].any()


def test_chunks_need_not_cover_holes(make_ids):
    ids = make_ids(8)
    trace = encode(ids, layer_ids=range(4), experts=8, version=V1, valid=np.arange(8) < 4, chunk_rows=4)
    del trace.header.chunks[1]
    routes = decode(trace)
    np.testing.assert_array_equal(routes.ids[:4], ids[:4])
    assert not routes.valid[4:].any()


def test_another_layer_count_means_bytes_of_its_own_layers_only(make_ids):
    trace = encode(make_ids(64, layers=8), layer_ids=range(8), experts=8, version=V1, chunk_rows=16, chunk_layers=2)
    reads = []

    def read(offset, length):
        reads.append(length)
        return trace.inline[offset : offset + length]

    elsewhere = pb.RoutingTrace(header=trace.header, blob_id="blob")
    shard = select(elsewhere, layer_ids=[4, 5], payload=read)
    assert sum(reads) == len(shard.inline) == len(trace.inline) // 4
    assert sum(length for _, _, length in byte_ranges(trace.header, layer_ids=[4, 5])) == len(shard.inline)


def test_chunks_inside_a_selection_are_copied_as_stored(make_ids):
    trace = encode(
        make_ids(40), layer_ids=range(4), experts=8, version=V1, chunk_rows=10, compression=pb.COMPRESSION_ZSTD
    )
    part = select(trace, rows=(5, 30))
    before = [chunk.checksum.value for chunk in trace.header.chunks]
    after = [chunk.checksum.value for chunk in part.header.chunks]
    assert after[1:] == before[1:3] and after[0] not in before


def test_truncate_keeps_the_first_rows(make_ids):
    ids = make_ids(20)
    trace = encode(ids, layer_ids=range(4), experts=8, version=V1, valid=np.arange(20) != 3, chunk_rows=8)
    short = decode(truncate(trace, 9), rows=9)
    np.testing.assert_array_equal(short.ids[short.valid], np.delete(ids[:9], 3, axis=0))


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("compression", [pb.COMPRESSION_NONE, pb.COMPRESSION_ZSTD])
def test_a_flipped_byte_is_refused(make_ids, compression, where):
    trace = encode(make_ids(50), layer_ids=range(4), experts=8, version=V1, chunk_rows=20, compression=compression)
    broken = bytearray(trace.inline)
    broken[trace.header.chunks[where].stored.offset + 9] ^= 1
    trace.inline = bytes(broken)
    with pytest.raises(ContractError, match=rf"chunks\[{where}\]"):
        decode(trace)


def test_a_frame_that_claims_another_size_is_refused(make_ids):
    zstandard = pytest.importorskip("zstandard")
    from vime_proto.checksum import checksum

    trace = encode(make_ids(50), layer_ids=range(4), experts=8, version=V1, compression=pb.COMPRESSION_ZSTD)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    trace.inline = bomb
    trace.header.payload_length = trace.header.chunks[0].stored.length = len(bomb)
    trace.header.chunks[0].checksum.CopyFrom(checksum(bomb))
    with pytest.raises(ContractError, match="does not hold 400 bytes"):
        decode(trace)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids.__setitem__((3, 2), [1, 8]), r"row 3, layer 7: ids \[1, 8\] are not in \[0, 8\)"),
        (lambda ids: ids.__setitem__((3, 2), [5, 5]), r"row 3, layer 7: ids \[5, 5\] name an expert twice"),
        (lambda ids: ids.__setitem__((slice(None), 1), 0), r"layers \[5\] hold only zeros"),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_wrong_ids_are_refused_by_name(make_ids, change, message, dtype):
    ids = make_ids(6).astype(dtype)
    change(ids)
    with pytest.raises(ContractError, match=message):
        encode(ids, layer_ids=[3, 5, 7, 9], experts=8, version=V1)
    unchecked = encode(ids, layer_ids=[3, 5, 7, 9], experts=8, version=V1, check=False)
    with pytest.raises(ContractError, match=message):
        decode(unchecked)


def test_negative_ids_are_refused(make_ids):
    ids = make_ids(6, dtype=np.int64)
    ids[2, 0, 1] = -1
    with pytest.raises(ContractError, match=r"row 2, layer 0: .* not in \[0, 8\)"):
        encode(ids, layer_ids=range(4), experts=8, version=V1)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 7), st.integers(0, 7), st.sampled_from([128, 256]))
def test_any_duplicate_of_eight_ids_is_found(seed, first, second, experts):
    rng = np.random.default_rng(seed)
    ids = rng.random((30, 2, experts)).argsort(axis=-1)[..., :8].astype(np.uint8)
    encode(ids, layer_ids=[0, 1], experts=experts, version=V1)
    if first != second:
        ids[17, 1, first] = ids[17, 1, second]
        with pytest.raises(ContractError, match="row 17, layer 1: .* twice"):
            encode(ids, layer_ids=[0, 1], experts=experts, version=V1)


@pytest.mark.parametrize("row", [0, 2730, 2999])
def test_a_duplicate_is_found_in_whichever_block_it_lies(make_ids, row):
    # 18,000 words of eight ids: the last ones are no full block.
    ids = np.ascontiguousarray(np.broadcast_to(np.arange(8, dtype=np.uint8), (3000, 6, 8)))
    ids[row, 5, 7] = ids[row, 5, 3]
    with pytest.raises(ContractError, match=f"row {row}, layer 5: .* twice"):
        encode(ids, layer_ids=range(6), experts=8, version=V1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.ClearField("rows"), "header.rows: must be set"),
        (lambda h: h.chunks[0].rows.ClearField("start"), r"chunks\[0\].rows: start and stop must be set"),
        (lambda h: h.chunks[1].layers.ClearField("stop"), r"chunks\[1\].layers: start and stop must be set"),
        (lambda h: h.chunks[0].stored.ClearField("offset"), r"chunks\[0\].stored: offset and length must be set"),
        (lambda h: setattr(h, "rows", 31), "no chunk|no policy version"),
        (lambda h: setattr(h, "rows", 1 << 60), "no chunk|no policy version"),
        (lambda h: setattr(h, "experts", 0), r"header.experts: must be in \[1, 65536\]"),
        (lambda h: setattr(h, "top_k", 9), r"header.top_k: must be in \[1, 8\]"),
        (lambda h: setattr(h, "dtype", common.DTYPE_UINT16), "must be DTYPE_UINT8 for 8 experts"),
        (lambda h: h.layer_ids.__setitem__(0, 9), "header.layer_ids: must be ascending"),
        (lambda h: h.chunks.add().CopyFrom(h.chunks[0]), "covered more than once"),
        (lambda h: h.chunks.__delitem__(1), r"rows \[10, 20\), layer 0, are no hole but have no chunk"),
        (lambda h: h.spans.__delitem__(0), r"rows \[0, 30\) have routes but no policy version"),
        (lambda h: setattr(h.chunks[2].stored, "offset", 999), "ends at byte"),
        (lambda h: setattr(h.chunks[2], "raw_length", 1), r"chunks\[2\].raw_length: must be 80"),
        (lambda h: setattr(h.chunks[2], "compression", 7), r"chunks\[2\].compression: unknown value 7"),
        (lambda h: h.holes.add(start=5, stop=5), r"holes\[0\]: \[5, 5\) is no range"),
        (lambda h: h.spans[0].version.ClearField("number"), r"spans\[0\].version.number: must be set"),
    ],
)
def test_headers_that_break_the_contract_are_refused(make_ids, change, message):
    trace = encode(make_ids(30), layer_ids=range(4), experts=8, version=V1, chunk_rows=10)
    check_header(trace.header)
    change(trace.header)
    with pytest.raises(ContractError, match=message):
        decode(trace)


def test_rows_other_than_tokens_minus_one_are_refused(make_ids):
    trace = encode(make_ids(30), layer_ids=range(4), experts=8, version=V1)
    with pytest.raises(ContractError, match=r"must be 31 \(tokens - 1\), got 30"):
        decode(trace, rows=31)


def test_a_trace_larger_than_the_limit_is_refused_before_memory_is_taken():
    header = pb.RoutingTraceHeader(
        experts=8, top_k=2, layer_ids=[0], rows=1 << 50, dtype=common.DTYPE_UINT8, payload_length=0
    )
    header.holes.add(start=0, stop=1 << 50)
    with pytest.raises(ContractError, match="more than the limit"):
        decode(pb.RoutingTrace(header=header, inline=b""))


def test_a_payload_elsewhere_must_be_given(make_ids):
    trace = encode(make_ids(30), layer_ids=range(4), experts=8, version=V1)
    elsewhere = pb.RoutingTrace(header=trace.header, uri="file:///routes/1")
    with pytest.raises(ContractError, match="payload: is uri, not inline"):
        decode(elsewhere)
    np.testing.assert_array_equal(decode(elsewhere, payload=trace.inline).ids, decode(trace).ids)
    with pytest.raises(ContractError, match="payload: has 3 bytes, the header says 240"):
        decode(elsewhere, payload=b"abc")


def test_spans_must_cover_every_row(make_ids, version):
    ids = make_ids(10)
    trace = encode(ids, layer_ids=range(4), experts=8, version=[(0, 4, version(1)), (4, 10, version(2))])
    assert [span.version.number for span in trace.header.spans] == [1, 2]
    with pytest.raises(ContractError, match="must cover every row"):
        encode(ids, layer_ids=range(4), experts=8, version=[(0, 4, version(1))])
    with pytest.raises(ContractError, match="ascending and disjoint"):
        encode(ids, layer_ids=range(4), experts=8, version=[(0, 6, version(1)), (5, 10, version(2))])
    with pytest.raises(ContractError, match=r"version\[0\].run_id"):
        encode(ids, layer_ids=range(4), experts=8, version=common.PolicyVersion(lineage=0, number=0))


def test_missing_zstandard_names_the_extra(make_ids, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ImportError, match=r"vime-r3\[zstd\]"):
        encode(make_ids(3), layer_ids=range(4), experts=8, version=V1, compression=pb.COMPRESSION_ZSTD)
