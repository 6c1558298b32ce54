"""The receiver's bookkeeping of a weight update."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_proto.checksum import checksum
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError, StatusError
from vime_proto.fakes import build, toy_weights
from vime_proto.fakes._toy_model import DIGEST, EXPECTED
from vime_proto.update_state import ChunkAssembler, UpdateReceiver, digest_of, expected_of
from vime_proto.version import policy_version

HELD, NEXT = policy_version("run", 0, 3), policy_version("run", 0, 4)
NAMES = list(toy_weights(0))


def _update(sources=2, chunk_tensors=1, names=NAMES, base=None, **options):
    tensors = {name: one for name, one in toy_weights(0).items() if name in names}
    manifest, streams = build.manifest(
        "u", NEXT, tensors, build.plan(names, sources, chunk_tensors), base, options.pop("checksums", True)
    )
    return UpdateReceiver(manifest, EXPECTED, HELD, **options), streams


def _code(call) -> grpc.StatusCode:
    with pytest.raises(StatusError) as caught:
        call()
    return caught.value.code


def _load_all(update, streams, sources=None):
    for source in sources or streams:
        for index, data in enumerate(streams[source]):
            update.check_chunk(source, index, data)
            update.chunk_loaded(source, index)


def test_expectations_of_a_model():
    update, _ = _update()
    assert expected_of(update.manifest.tensors) == EXPECTED
    assert digest_of(EXPECTED) == DIGEST == update.manifest.model_digest


def test_an_update_is_complete_when_every_source_is():
    update, streams = _update()
    assert not update.complete and update.missing() == {"rank-0": 3, "rank-1": 2}
    _load_all(update, streams, ["rank-0"])
    assert update.missing() == {"rank-1": 2}
    _load_all(update, streams, ["rank-1"])
    assert update.complete and update.bytes_loaded == sum(len(c) for cs in streams.values() for c in cs)
    update.check_totals(build.totals(streams))
    update.check_checksums(build.totals(streams))


def test_a_source_without_chunks_is_complete_from_the_start():
    update, streams = _update(sources=7)
    assert set(streams) - set(update.missing()) == {"rank-5", "rank-6"}
    _load_all(update, streams)
    update.check_totals(build.totals(streams))


@given(st.lists(st.integers(0, 3), max_size=4))
def test_only_the_next_chunks_in_order_are_taken(chunks):
    update, streams = _update(sources=1, chunk_tensors=2)
    update.chunk_loaded("rank-0", 0)
    if chunks in ([1], [1, 2]):
        assert [chunk.index for chunk in update.check_load("rank-0", chunks)] == chunks
    else:
        with pytest.raises(ContractError, match=r"chunks.*rank-0"):
            update.check_load("rank-0", chunks)


def test_an_unknown_source_is_named_with_the_valid_ones():
    update, _ = _update()
    with pytest.raises(ContractError, match=r"'nobody'; valid: rank-0, rank-1"):
        update.check_load("nobody", [0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda e: {**e, "extra": (common.DTYPE_FLOAT32, (1,))}, "lacks 'extra'"),
        (lambda e: {k: v for k, v in e.items() if k != "lm_head.weight"}, "no tensor 'lm_head.weight'"),
        (lambda e: {**e, "lm_head.weight": (common.DTYPE_FLOAT32, (8, 32))}, r"expected \[8, 32\], got \[32, 8\]"),
        (lambda e: {**e, "lm_head.weight": (common.DTYPE_BFLOAT16, (32, 8))}, "expected bfloat16, got float32"),
    ],
)
def test_another_model_is_refused_by_tensor(change, text):
    manifest = build.manifest("u", NEXT, toy_weights(0))[0]
    with pytest.raises(ContractError, match=text):
        UpdateReceiver(manifest, change(EXPECTED), HELD)


def test_a_delta_states_the_digest_of_the_whole_model():
    tensors = {"lm_head.weight": toy_weights(0)["lm_head.weight"]}
    manifest, _ = build.manifest("u", NEXT, tensors, base=HELD)
    with pytest.raises(ContractError, match="model_digest"):
        UpdateReceiver(manifest, EXPECTED, HELD)
    manifest.model_digest = DIGEST
    assert not UpdateReceiver(manifest, EXPECTED, HELD).full
    for held in (None, policy_version("run", 0, 2), policy_version("run", 1, 3)):
        assert _code(lambda held=held: UpdateReceiver(manifest, EXPECTED, held)) is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("spoil", [lambda d: d[:-1], lambda d: d + b"x", lambda d: bytes([d[0] ^ 1]) + d[1:]])
def test_damaged_bytes_are_data_loss(spoil):
    update, streams = _update()
    assert _code(lambda: update.check_chunk("rank-0", 0, spoil(streams["rank-0"][0]))) is grpc.StatusCode.DATA_LOSS
    assert update.missing()["rank-0"] == 3, "nothing counts as loaded"


@pytest.mark.parametrize("algorithm", [common.CHECKSUM_ALGORITHM_XXH3_64, common.CHECKSUM_ALGORITHM_SHA256])
def test_totals_cover_chunks_without_checksum(algorithm):
    update, streams = _update(checksums=False)
    _load_all(update, streams)
    totals = build.totals(streams)
    for total in totals:
        total.checksum.CopyFrom(checksum(b"".join(streams[total.source_id]), algorithm))
    update.check_totals(totals)
    update.check_checksums(totals)
    totals[1].checksum.value = b"\0" * len(totals[1].checksum.value)
    assert _code(lambda: update.check_checksums(totals)) is grpc.StatusCode.DATA_LOSS
    totals[0].ClearField("checksum")
    with pytest.raises(ContractError, match=r"totals\[0\]\.checksum"):
        update.check_totals(totals)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda t: t.pop(), "lacks the sources rank-1"),
        (lambda t: t.append(t[0]), "'rank-0' is repeated"),
        (lambda t: setattr(t[0], "source_id", "nobody"), "unknown source 'nobody'"),
        (lambda t: setattr(t[0], "chunks", 7), "the manifest says 3, got 7"),
        (lambda t: setattr(t[1], "bytes", 0), "got 0"),
        (lambda t: t[1].ClearField("bytes"), "got nothing"),
    ],
)
def test_totals_must_agree_with_the_manifest(spoil, text):
    update, streams = _update()
    totals = build.totals(streams)
    spoil(totals)
    with pytest.raises(ContractError, match=text):
        update.check_totals(totals)


def test_the_deadline_is_counted_from_begin():
    now = 100.0
    update, _ = _update(deadline_seconds=5, clock=lambda: now)
    assert not update.expired and update.seconds_left == 5
    now = 104.0
    assert (update.seconds, update.seconds_left) == (4.0, 1.0)
    now = 105.0
    assert update.expired and update.seconds_left == 0
    with pytest.raises(ContractError, match="deadline_seconds"):
        _update(deadline_seconds=0)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_parts_of_any_size_make_the_chunk(sizes):
    update, streams = _update(sources=1, chunk_tensors=None)
    (whole,) = streams["rank-0"]
    assembler, at, got, turn = ChunkAssembler(update, "rank-0"), 0, None, 0
    while at < len(whole):
        part = whole[at : at + sizes[turn % len(sizes)]]
        got = assembler.add(0, at, part)
        at, turn = at + len(part), turn + 1
        assert (got is None) == (at < len(whole))
    assert got == whole
    assembler.end()


@pytest.mark.parametrize(
    ("chunk", "offset", "data", "field"),
    [(0, 5, b"x", "offset"), (1, 4, b"x", "chunk"), (0, 4, b"x" * 10_000, "data")],
)
def test_parts_that_do_not_follow_are_refused(chunk, offset, data, field):
    update, _ = _update(sources=1)
    assembler = ChunkAssembler(update, "rank-0")
    assert assembler.add(0, 0, b"abcd") is None
    with pytest.raises(ContractError) as caught:
        assembler.add(chunk, offset, data)
    assert caught.value.violations[0][0] == field
    with pytest.raises(ContractError, match="ended at byte 4 of chunk 0"):
        assembler.end()
