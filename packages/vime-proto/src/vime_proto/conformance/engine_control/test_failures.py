"""Weight updates that fail: refused before a byte is loaded, or stale afterwards; the version never lies."""

from __future__ import annotations

import time

import grpc
import pytest

from vime_proto.checksum import checksum
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.conformance._calls import DATA_LOSS, INVALID, NOT_FOUND, PRECONDITION, UNAVAILABLE, new_id, refused
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.validate import model_digest
from vime_proto.version import policy_version
from vime_proto.weights.v1 import weights_pb2

UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED


def _digest(manifest) -> None:
    manifest.model_digest = model_digest(manifest.tensors)


def _rename(m):
    m.tensors[0].name += ".x"
    for source in m.sources:
        for chunk in source.chunks:
            del chunk.tensors[:]


def _reshape(m):
    m.tensors[0].shape.append(1)


def _another_type(m):
    size = {1: common.DTYPE_INT8, 2: common.DTYPE_INT16, 4: common.DTYPE_INT32, 8: common.DTYPE_INT64}
    tensor = m.tensors[0]
    count = 1
    for length in tensor.shape:
        count *= length
    tensor.dtype = size[tensor.pieces[0].bytes.length // count]


def _drop(m):
    """Drops the last tensor and its bytes."""
    last = m.tensors.pop()
    chunk = m.sources[0].chunks[-1]
    chunk.bytes.length -= last.pieces[0].bytes.length
    m.sources[0].total_bytes -= last.pieces[0].bytes.length
    chunk.ClearField("checksum")
    if last.name in chunk.tensors:
        chunk.tensors.remove(last.name)


@pytest.mark.parametrize("spoil", [_rename, _reshape, _another_type, _drop])
def test_another_model_is_refused_by_tensor_before_a_byte_is_loaded(engine, any_transport, spoil):
    update, before = engine.update(), engine.greedy()
    held = engine.status().version
    name = update.manifest.tensors[-1 if spoil is _drop else 0].name
    spoil(update.manifest)
    _digest(update.manifest)
    with refused(INVALID, PRECONDITION, names=name):
        engine.begin(update, any_transport)
    status = engine.status()
    assert (status.state, status.version) == (pb.ENGINE_STATE_SERVING, held)
    assert engine.greedy() == before


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda m: m.ClearField("update_id"), "update_id"),
        (lambda m: setattr(m, "update_id", "../up"), "update_id"),
        (lambda m: m.ClearField("version"), "version"),
        (lambda m: m.version.ClearField("number"), "version.number"),
        (lambda m: setattr(m, "model_digest", "0" * 64), "model_digest"),
        (lambda m: setattr(m.sources[0].chunks[0].bytes, "offset", 1), "chunks"),
        (lambda m: setattr(m.sources[0], "total_bytes", 1), "total_bytes"),
        (lambda m: setattr(m.tensors[0].pieces[0], "source_id", "nobody"), "source_id"),
        (lambda m: m.tensors.append(m.tensors[0]), "tensors"),
        (lambda m: m.tensors[0].ClearField("pieces"), "pieces"),
    ],
)
def test_a_malformed_manifest_is_refused_by_field(engine, any_transport, spoil, field):
    update = engine.update()
    spoil(update.manifest)
    with refused(INVALID, field=field):
        engine.begin(update, any_transport)
    assert engine.status().state == pb.ENGINE_STATE_SERVING


def test_a_delta_on_another_base_is_refused(engine, any_transport):
    update, held = engine.update(), engine.status().version
    update.manifest.base_version.CopyFrom(policy_version(held.run_id, held.lineage, held.number + 500))
    with refused(PRECONDITION, INVALID, UNIMPLEMENTED):
        engine.begin(update, any_transport)
    assert engine.status().version == held


def test_an_unknown_transport_is_named(engine):
    with refused(NOT_FOUND, PRECONDITION, INVALID, names="nobody"):
        engine.begin(engine.update(), "nobody")
    with refused(NOT_FOUND, names="nobody"):
        engine.call("DestroyTransport", pb.DestroyTransportRequest, transport_id="nobody")


def test_a_transport_that_the_engine_has_not_is_refused(engine):
    if "nccl" in engine.status().transports:
        pytest.skip("the target has NCCL")
    nccl = weights_pb2.NcclTransport(store_address="127.0.0.1:1", world_size=2, group_id="g", timeout_seconds=1)
    config = weights_pb2.TransportConfig(transport_id=new_id(), nccl=nccl)
    with refused(INVALID, PRECONDITION, UNIMPLEMENTED):
        engine.call("InitTransport", pb.InitTransportRequest, config=config)


def test_a_transport_in_use_stays(engine, any_transport):
    update = engine.update()
    engine.begin(update, any_transport)
    with refused(PRECONDITION):
        engine.call("DestroyTransport", pb.DestroyTransportRequest, transport_id=any_transport)
    engine.abort(update)
    engine.call("DestroyTransport", pb.DestroyTransportRequest, transport_id=any_transport)
    with refused(NOT_FOUND, PRECONDITION, INVALID):
        engine.begin(engine.update(), any_transport)


def test_nothing_is_loaded_without_an_open_update(engine, any_transport):
    update = engine.update()
    with refused(PRECONDITION, NOT_FOUND):
        engine.send(update, any_transport, "rank-0")
    with refused(PRECONDITION, NOT_FOUND):
        engine.commit(update)
    with refused(PRECONDITION, NOT_FOUND):
        engine.abort(update)
    assert engine.status().state == pb.ENGINE_STATE_SERVING


def test_chunks_out_of_order_are_refused_and_the_update_stays_open(engine, any_transport):
    update = engine.update(several=True)
    engine.begin(update, any_transport)
    with refused(INVALID, names="rank-0"):
        engine.send(update, any_transport, "rank-0", [1])
    with refused(INVALID, names="nobody"):
        update.streams["nobody"] = [b"x"]
        engine.send(update, any_transport, "nobody", [0])
    del update.streams["nobody"]
    engine.send(update, any_transport, "rank-0", [0])
    with refused(INVALID, names="rank-0"):
        engine.send(update, any_transport, "rank-0", [0])
    engine.send(update, any_transport, "rank-0", range(1, len(update.streams["rank-0"])))
    assert engine.commit(update).status.state == pb.ENGINE_STATE_SERVING


def test_totals_that_contradict_the_manifest_are_refused_and_the_update_stays_open(engine, any_transport):
    update = engine.update(sources=2)
    engine.begin(update, any_transport)
    for source in update.streams:
        engine.send(update, any_transport, source)
    wrong = update.totals
    wrong[0].bytes += 1
    for totals in (update.totals[:1], wrong, [*update.totals, weights_pb2.SourceTotal(source_id="nobody")]):
        with refused(INVALID, field="totals"):
            engine.commit(update, totals=totals)
    assert engine.commit(update).status.version == update.manifest.version


def test_giving_up_before_a_byte_is_loaded_goes_back(engine, any_transport):
    before, held = engine.greedy(), engine.status().version
    update = engine.update()
    engine.begin(update, any_transport)
    status = engine.abort(update)
    assert (status.state, status.version) == (pb.ENGINE_STATE_SERVING, held)
    assert engine.greedy() == before


def test_giving_up_goes_back_to_paused_when_it_was(engine, any_transport):
    engine.pause()
    update = engine.update()
    engine.begin(update, any_transport)
    assert engine.abort(update).state == pb.ENGINE_STATE_PAUSED


def test_giving_up_later_leaves_stale_until_a_full_update(engine, any_transport):
    update = engine.update(several=True)
    engine.begin(update, any_transport)
    engine.send(update, any_transport, "rank-0", [0])
    status = engine.abort(update)
    assert status.state == pb.ENGINE_STATE_STALE and status.reason
    assert not status.HasField("version"), "no version is to be trusted"
    with refused(UNAVAILABLE):
        engine.generate()
    delta = engine.update()
    delta.manifest.base_version.CopyFrom(policy_version("conformance", 0, 0))
    with refused(PRECONDITION, INVALID, UNIMPLEMENTED):
        engine.begin(delta, any_transport)
    with refused(PRECONDITION):
        engine.resume()
    full = engine.update()
    assert engine.push(any_transport, full).status.state == pb.ENGINE_STATE_SERVING
    assert engine.generate().last.version == full.manifest.version


def test_a_damaged_first_chunk_changes_nothing(engine, transport):
    before, held = engine.greedy(), engine.status().version
    update = engine.update()
    engine.begin(update, transport)
    data = bytearray(update.streams["rank-0"][0])
    data[0] ^= 1
    update.streams["rank-0"][0] = bytes(data)
    with refused(DATA_LOSS, names="rank-0"):
        engine.send(update, transport, "rank-0")
    status = engine.status()
    assert (status.state, status.version) == (pb.ENGINE_STATE_SERVING, held)
    assert engine.greedy() == before


def test_a_damaged_later_chunk_leaves_stale(engine, transport):
    update = engine.update(several=True)
    engine.begin(update, transport)
    engine.send(update, transport, "rank-0", [0])
    data = bytearray(update.streams["rank-0"][1])
    data[-1] ^= 128
    update.streams["rank-0"][1] = bytes(data)
    with refused(DATA_LOSS, names="rank-0"):
        engine.send(update, transport, "rank-0", [1])
    status = engine.status()
    assert status.state == pb.ENGINE_STATE_STALE and not status.HasField("version")
    assert engine.push(transport).status.state == pb.ENGINE_STATE_SERVING


def test_a_wrong_total_checksum_is_found_at_commit(engine, any_transport):
    update = engine.update(checksums=False)
    engine.begin(update, any_transport)
    engine.send(update, any_transport, "rank-0")
    totals = update.totals
    totals[0].checksum.CopyFrom(checksum(b"other"))
    with refused(DATA_LOSS):
        engine.commit(update, totals=totals)
    status = engine.status()
    assert status.state == pb.ENGINE_STATE_STALE and not status.HasField("version")


def test_a_missing_file_does_not_advance_the_version(engine):
    transport = engine.transport("file")
    update, held = engine.update(), engine.status().version
    engine.begin(update, transport)
    with pytest.raises(grpc.RpcError):
        engine.call("LoadChunks", pb.LoadChunksRequest, update_id=update.update_id, source_id="rank-0", chunks=[0])
    status = engine.status()
    if status.state == pb.ENGINE_STATE_RECEIVING:
        status = engine.abort(update)
    assert (status.state, status.version) == (pb.ENGINE_STATE_SERVING, held)


def test_an_update_that_is_not_committed_ends_by_itself(engine, any_transport):
    held = engine.status().version
    engine.begin(engine.update(), any_transport, deadline_seconds=0.5)
    end = time.monotonic() + 10
    while engine.status().state == pb.ENGINE_STATE_RECEIVING:
        assert time.monotonic() < end, "still open 10 s after its deadline of 0.5 s"
        time.sleep(0.05)
    status = engine.status()
    assert (status.state, status.version) == (pb.ENGINE_STATE_SERVING, held)
    assert engine.push(any_transport).status.state == pb.ENGINE_STATE_SERVING, "the next update starts"


def test_other_control_calls_wait_for_the_end_of_the_update(engine, any_transport):
    engine.begin(engine.update(), any_transport)
    for method, request in (("Resume", pb.ResumeRequest()), ("Sleep", pb.SleepRequest(level=1))):
        request.request_id = new_id()
        with refused(PRECONDITION, UNIMPLEMENTED):
            getattr(engine.control, method)(request, timeout=engine.timeout)
    assert engine.status().state == pb.ENGINE_STATE_RECEIVING


def test_an_asleep_engine_takes_no_update(engine, any_transport):
    assert engine.weights
    engine.or_skip("sleep", lambda: engine.call("Sleep", pb.SleepRequest, level=1))
    with refused(PRECONDITION):
        engine.begin(engine.update(), any_transport)
