"""Updates that fail: the old version when nothing was loaded, STALE otherwise, and the way out."""

import concurrent.futures
import threading

import grpc
import numpy as np
import pytest
from pushing import TIMEOUT, manifest_of, new_id, totals_of

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import describe
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.validate import model_digest
from vime_proto.weights.v1 import weights_pb2 as weights

PROMPT = [1, 5, 9, 17]
INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


def fails(code, text, call, *args, **more):
    with pytest.raises(grpc.RpcError) as error:
        call(*args, **more)
    assert error.value.code() is code, describe(error.value)
    assert text in describe(error.value)


def prepared(engine, tensors=None, chunks=1, kind="shm", **more):
    manifest, parts = manifest_of(engine.tensors if tensors is None else tensors, engine.next_version(), chunks, **more)
    pusher = engine.pusher(kind)
    if kind != "stream":
        pusher.write(manifest, parts)
    return pusher, manifest, parts


@pytest.fixture
def unchanged(tied):
    """The engine's version and output are the same afterwards, and no update is open."""
    before, output = tied.status().version, tied.generate(PROMPT, 8, ignore_eos=True)
    yield
    status = tied.status()
    assert status.version == before and not status.update_id
    after = tied.generate(PROMPT, 8, ignore_eos=True)
    assert after.tokens == output.tokens and np.array_equal(after.logprobs, output.logprobs)


def wrong(tensors, **changes):
    return {**tensors, **changes}


def test_what_does_not_fit_is_refused_by_name_before_a_byte(tied, unchanged):
    def refuse(text, tensors, **more):
        pusher, manifest, _ = prepared(tied, tensors, **more)
        fails(INVALID, text, pusher.begin, manifest)

    name = "model.layers.0.mlp.up_proj.weight"
    lacking = {key: value for key, value in tied.tensors.items() if key != name}
    refuse(f"lacks '{name}'", lacking)
    refuse(f"did you mean '{name}'", {**lacking, name.replace("up_proj", "up_porj"): tied.tensors[name]})
    refuse("lm_head.weight", {**tied.tensors, "lm_head.weight": tied.tensors["model.embed_tokens.weight"]})
    refuse(name, {**tied.tensors, name: tied.tensors[name].T})
    refuse("model_digest", tied.tensors, digest="0" * 64)
    pusher, manifest, _ = prepared(tied)
    for spec in manifest.tensors:
        if spec.name == "model.norm.weight":
            spec.dtype = common.DTYPE_INT32
    manifest.model_digest = model_digest(manifest.tensors)
    fails(INVALID, "model.norm.weight", pusher.begin, manifest)


def test_deltas_need_their_base_and_whole_modules(tied, unchanged):
    digest, version = tied.model.model_digest, tied.status().version
    query = {"model.layers.0.self_attn.q_proj.weight": tied.tensors["model.layers.0.self_attn.q_proj.weight"]}
    pusher, manifest, _ = prepared(tied, query, base=version, digest=digest)
    fails(INVALID, "k_proj", pusher.begin, manifest)
    norm = {"model.norm.weight": tied.tensors["model.norm.weight"]}
    pusher, manifest, _ = prepared(tied, norm, base=tied.next_version(), digest=digest)
    fails(PRECONDITION, "this engine holds", pusher.begin, manifest)


def test_wrong_first_bytes_leave_the_old_weights(tied, unchanged):
    pusher, manifest, parts = prepared(tied)
    parts["rank0"][0] = b"\1" * len(parts["rank0"][0])
    pusher.write(manifest, parts)
    pusher.begin(manifest)
    fails(grpc.StatusCode.DATA_LOSS, "checksum", pusher.load, manifest, parts)
    broken = {**tied.tensors, "model.norm.weight": np.full(64, np.nan, dtype=np.float32)}
    pusher, manifest, parts = prepared(tied, broken)
    pusher.begin(manifest)
    fails(grpc.StatusCode.DATA_LOSS, "model.norm.weight", pusher.load, manifest, parts)


def test_later_failures_leave_a_stale_engine_that_only_a_full_update_cures(tied):
    output = tied.generate(PROMPT, 8, ignore_eos=True).tokens
    before = tied.status().version
    broken = {key: value.copy() for key, value in tied.tensors.items()}
    name = list(broken)[-1]
    broken[name][3, 3] = np.inf
    pusher, manifest, parts = prepared(tied, broken, chunks=3)
    pusher.begin(manifest)
    pusher.load(manifest, parts, chunks=[0, 1])
    fails(grpc.StatusCode.DATA_LOSS, name, pusher.load, manifest, parts, chunks=[2])
    status = tied.status()
    assert status.state == pb.ENGINE_STATE_STALE and name in status.reason and not status.HasField("version")
    fails(grpc.StatusCode.UNAVAILABLE, name, tied.generate, PROMPT, 1)
    norm = {"model.norm.weight": tied.tensors["model.norm.weight"]}
    delta, small, _ = prepared(tied, norm, base=before, digest=tied.model.model_digest)
    fails(PRECONDITION, "base", delta.begin, small)
    fails(PRECONDITION, "no update is open", pusher.commit, manifest)
    pusher.push(tied.tensors, tied.next_version(), chunks=3)
    assert tied.generate(PROMPT, 8, ignore_eos=True).tokens == output


def test_weights_that_overflow_fail_requests_by_name_and_leave_no_trace(tied):
    """Finite weights may still compute NaN, and what they leave in the KV cache must not outlive them."""
    output = tied.generate(PROMPT, 8, ignore_eos=True)
    large = {key: value.copy() for key, value in tied.tensors.items()}
    for layer in range(2):
        large[f"model.layers.{layer}.self_attn.v_proj.weight"] *= np.float32(1e38)
        large[f"model.layers.{layer}.self_attn.o_proj.weight"] *= np.float32(1e38)
    pusher = tied.pusher()
    pusher.push(large, tied.next_version())
    for length in (4, 100):
        with pytest.raises(grpc.RpcError) as error:
            tied.generate(PROMPT * (length // 4), 8, request_id=f"overflow-{length}", ignore_eos=True)
        assert error.value.code() is grpc.StatusCode.INTERNAL
        assert f"'overflow-{length}'" in error.value.details() and "log-probability of token 0" in error.value.details()
    pusher.push(tied.tensors, tied.next_version())
    again = tied.generate(PROMPT, 8, ignore_eos=True)
    assert again.tokens == output.tokens and np.array_equal(again.logprobs, output.logprobs)
    assert len(tied.generate([9] * 100, 40, ignore_eos=True).tokens) == 40


def test_kept_requests_end_when_the_update_fails(tied):
    stream = tied.stream(PROMPT, 200, ignore_eos=True)
    messages = [next(stream)]
    version = tied.status().version
    pusher, manifest, parts = prepared(tied, chunks=2)
    pusher.begin(manifest, pb.IN_FLIGHT_POLICY_KEEP)
    pusher.load(manifest, parts, chunks=[0])
    request = pb.AbortUpdateRequest(request_id=new_id(), update_id=manifest.update_id, reason="changed my mind")
    status = tied.control.AbortUpdate(request, timeout=TIMEOUT).status
    assert status.state == pb.ENGINE_STATE_STALE and "changed my mind" in status.reason
    messages += stream
    assert messages[-1].finish_reason == 3 and all(one.version == version for one in messages)
    pusher.push(tied.tensors, tied.next_version())


def test_giving_up_before_the_first_byte(tied, unchanged):
    pusher, manifest, parts = prepared(tied)
    assert pusher.begin(manifest).status.update_id == manifest.update_id
    request = pb.AbortUpdateRequest(request_id=new_id(), update_id=manifest.update_id)
    assert tied.control.AbortUpdate(request, timeout=TIMEOUT).status.state == pb.ENGINE_STATE_SERVING
    fails(PRECONDITION, "no update is open", pusher.load, manifest, parts)


def test_a_file_that_is_not_there_yet_can_be_asked_for_again(tied):
    manifest, parts = manifest_of(tied.tensors, tied.next_version())
    pusher = tied.pusher()
    pusher.begin(manifest)
    fails(grpc.StatusCode.NOT_FOUND, "0.bin", pusher.load, manifest, parts)
    pusher.write(manifest, parts)
    pusher.load(manifest, parts)
    assert pusher.commit(manifest).status.version == manifest.version


def test_an_update_ends_at_its_deadline(tied, unchanged):
    pusher, manifest, parts = prepared(tied)
    pusher.begin(manifest, deadline_seconds=0.2)
    fails(PRECONDITION, "no update is open", pusher.commit, manifest)
    assert tied.status().state == pb.ENGINE_STATE_SERVING


def test_commit_waits_for_every_sender(tied):
    pusher, manifest, parts = prepared(tied, sources=("fast", "slow"))
    pusher.begin(manifest)
    pusher.load(manifest, parts, "fast")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        commit = pool.submit(pusher.commit, manifest)
        threading.Event().wait(0.5)
        assert not commit.done() and tied.status().state == pb.ENGINE_STATE_RECEIVING
        pusher.load(manifest, parts, "slow")
        assert commit.result(TIMEOUT).status.version == manifest.version


def test_commit_needs_matching_totals(tied):
    pusher, manifest, parts = prepared(tied)
    pusher.begin(manifest)
    pusher.load(manifest, parts)
    totals = totals_of(manifest)
    totals[0].bytes += 4
    request = pb.CommitUpdateRequest(request_id=new_id(), update_id=manifest.update_id, totals=totals)
    fails(INVALID, "totals[0].bytes", tied.control.CommitUpdate, request, timeout=TIMEOUT)
    assert pusher.commit(manifest).status.version == manifest.version


def test_two_callers_of_one_update_load_it_once(tied):
    """Ids that follow from the update make the calls of a second caller repetitions of the first one's."""
    pusher, manifest, parts = prepared(tied, chunks=2)
    before = tied.status().version
    barrier = threading.Barrier(2)

    def whole():
        barrier.wait()
        pusher.begin(manifest)
        loaded = pusher.load(manifest, parts, request_id=f"{manifest.update_id}-load")
        return loaded, pusher.commit(manifest)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        (first, done), (second, done_too) = [one.result(TIMEOUT) for one in [pool.submit(whole) for _ in range(2)]]
    size = sum(map(len, parts["rank0"]))
    assert first == second and first.bytes == size
    assert done.status.version == done_too.status.version == manifest.version != before
    assert done.bytes == done_too.bytes == size
    # A caller that comes when all is done finds it done.
    assert pusher.begin(manifest).status.state == pb.ENGINE_STATE_SERVING
    assert pusher.commit(manifest).status.version == manifest.version


def test_of_two_different_updates_one_is_refused(tied):
    pusher, manifest, parts = prepared(tied)
    _, other, _ = prepared(tied)
    pusher.begin(manifest)
    fails(PRECONDITION, manifest.update_id, pusher.begin, other)
    pusher.load(manifest, parts)
    assert pusher.commit(manifest).status.version == manifest.version


def test_a_repeated_request_id_changes_nothing(tied):
    pusher, manifest, parts = prepared(tied)
    begin = pb.BeginUpdateRequest(request_id=new_id(), manifest=manifest, transport_id=pusher.transport_id)
    first = tied.control.BeginUpdate(begin, timeout=TIMEOUT)
    load = pb.LoadChunksRequest(request_id=new_id(), update_id=manifest.update_id, source_id="rank0", chunks=[0])
    loads = [tied.control.LoadChunks(load, timeout=TIMEOUT) for _ in range(2)]
    assert loads[0] == loads[1] and loads[0].bytes == len(parts["rank0"][0])
    commit = pb.CommitUpdateRequest(request_id=new_id(), update_id=manifest.update_id, totals=totals_of(manifest))
    done = [tied.control.CommitUpdate(commit, timeout=TIMEOUT) for _ in range(2)]
    assert done[0] == done[1]
    assert tied.control.BeginUpdate(begin, timeout=TIMEOUT) == first
    assert tied.status().state == pb.ENGINE_STATE_SERVING
    begin.deadline_seconds = 5
    fails(INVALID, "another payload", tied.control.BeginUpdate, begin, timeout=TIMEOUT)


def test_transports_are_checked_where_they_are_set_up(tied, tmp_path):
    def init(**config):
        request = pb.InitTransportRequest(request_id=new_id(), config=weights.TransportConfig(**config))
        return tied.control.InitTransport(request, timeout=TIMEOUT)

    outside = weights.ShmTransport(root=str(tmp_path))
    fails(INVALID, "not under", init, transport_id="outside", shm=outside)
    sneaky = weights.ShmTransport(root=f"{tied.root}/shm/../../..")
    fails(INVALID, "not under", init, transport_id="sneaky", shm=sneaky)
    fails(
        INVALID,
        "nccl",
        init,
        transport_id="n",
        nccl=weights.NcclTransport(store_address="h:1", world_size=2, group_id="g"),
    )
    init(transport_id="twice", stream=weights.StreamTransport())
    init(transport_id="twice", stream=weights.StreamTransport())
    fails(
        grpc.StatusCode.ALREADY_EXISTS, "another configuration", init, transport_id="twice",
        shm=weights.ShmTransport(root=f"{tied.root}/shm"),
    )  # fmt: skip
    pusher, manifest, _ = prepared(tied)
    pusher.transport_id = "twcie"
    fails(grpc.StatusCode.NOT_FOUND, "did you mean 'twice'", pusher.begin, manifest)
    destroy = lambda name: tied.control.DestroyTransport(  # noqa: E731
        pb.DestroyTransportRequest(request_id=new_id(), transport_id=name), timeout=TIMEOUT
    )
    destroy("twice")
    fails(grpc.StatusCode.NOT_FOUND, "twice", destroy, "twice")


def test_a_transport_in_use_stays(tied, unchanged):
    pusher, manifest, _ = prepared(tied)
    pusher.begin(manifest)
    request = pb.DestroyTransportRequest(request_id=new_id(), transport_id=pusher.transport_id)
    fails(PRECONDITION, manifest.update_id, tied.control.DestroyTransport, request, timeout=TIMEOUT)
    abort = pb.AbortUpdateRequest(request_id=new_id(), update_id=manifest.update_id)
    tied.control.AbortUpdate(abort, timeout=TIMEOUT)


def test_a_stream_that_ends_early_can_be_sent_again(tied):
    pusher, manifest, parts = prepared(tied, kind="stream")
    pusher.begin(manifest)
    half = [
        pb.SendChunksRequest(
            update_id=manifest.update_id, source_id="rank0", chunk=0, offset=0, data=parts["rank0"][0][:1000]
        )
    ]
    fails(INVALID, "the stream ended at byte 1000", tied.control.SendChunks, iter(half), timeout=TIMEOUT)
    pusher.load(manifest, parts)
    assert pusher.commit(manifest).status.version == manifest.version
