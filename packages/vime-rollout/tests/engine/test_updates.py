"""Weights that arrive: by every transport, in any number of chunks, whole or in part."""

import models
import numpy as np
import pytest
from pushing import manifest_of
from reference import Reference

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.validate import model_digest

PROMPT = [1, 5, 9, 17, 33, 40, 8]


def greedy(engine):
    answer = engine.generate(PROMPT, 24, ignore_eos=True)
    return answer.tokens, answer.logprobs.tobytes()


@pytest.mark.parametrize("name", ["moe", "tied"])
@pytest.mark.parametrize("kind", ["shm", "file", "stream"])
def test_pushing_the_same_weights_changes_no_bit(name, kind, request):
    engine = request.getfixturevalue(name)
    pusher = engine.pusher(kind)
    first = greedy(engine)
    for chunks in (1, 3, 1, 3):
        done = pusher.push(engine.tensors, engine.next_version(), chunks)
        assert done.bytes == sum(one.nbytes for one in engine.tensors.values()) and done.seconds > 0
        assert greedy(engine) == first


@pytest.mark.parametrize("name", ["moe", "tied"])
def test_other_weights_and_back(name, request, tmp_path):
    engine = request.getfixturevalue(name)
    first = greedy(engine)
    for seed, chunks in ((41, 7), (42, 2)):
        other = models.weights(engine.config, seed)
        engine.pusher("stream").push(other, engine.next_version(), chunks)
        answer = engine.generate(PROMPT, 24, ignore_eos=True)
        assert (answer.tokens, answer.logprobs.tobytes()) != first
        reference = Reference.of(tmp_path / str(seed), engine.config, other)
        assert np.abs(answer.logprobs - reference.of_response(PROMPT, answer.tokens)).max() < 1e-5
    engine.pusher().push(engine.tensors, engine.next_version(), 5)
    assert greedy(engine) == first


def test_several_senders_one_of_them_with_nothing(moe):
    first = greedy(moe)
    pusher = moe.pusher()
    tensors = dict(sorted(moe.tensors.items()))
    pusher.push(tensors, moe.next_version(), 2, sources=("rank0", "rank1", "rank2"))
    assert greedy(moe) == first
    # A rank that owns no parameter is complete from the start.
    manifest, parts = manifest_of(moe.tensors, moe.next_version())
    manifest.sources.add(source_id="idle", total_bytes=0)
    parts["idle"] = []
    pusher.write(manifest, parts)
    pusher.begin(manifest)
    pusher.load(manifest, parts)
    pusher.commit(manifest)
    assert greedy(moe) == first


def test_tensors_in_pieces_of_several_ranks(tied):
    """Tensor-parallel ranks send slices: rows of one tensor from two sources, cut again by chunks."""
    first = greedy(tied)
    manifest, parts = manifest_of(tied.tensors, tied.next_version())
    half = {"a": b"", "b": b""}
    for spec in manifest.tensors:
        array = tied.tensors[spec.name]
        del spec.pieces[:]
        if array.ndim == 1:
            data = array.tobytes()
            spec.pieces.add(source_id="a", bytes=common.ByteRange(offset=len(half["a"]), length=len(data)))
            half["a"] += data
            continue
        middle = array.shape[0] // 2
        for source, low, high in (("a", 0, middle), ("b", middle, array.shape[0])):
            data = array[low:high].tobytes()
            spec.pieces.add(
                source_id=source, bytes=common.ByteRange(offset=len(half[source]), length=len(data)),
                start=[low, 0], shape=[high - low, array.shape[1]],
            )  # fmt: skip
            half[source] += data
    del manifest.sources[:]
    parts = {}
    for source, stream in half.items():
        step = len(stream) // 3 // 4 * 4 + 4
        parts[source] = [stream[low : low + step] for low in range(0, len(stream), step)]
        entry = manifest.sources.add(source_id=source, total_bytes=len(stream))
        from vime_proto.checksum import checksum

        for index, part in enumerate(parts[source]):
            entry.chunks.add(
                index=index, bytes=common.ByteRange(offset=index * step, length=len(part)), checksum=checksum(part)
            )
    pusher = tied.pusher()
    pusher.write(manifest, parts)
    pusher.begin(manifest)
    for source in ("b", "a"):
        pusher.load(manifest, parts, source)
    pusher.commit(manifest)
    assert greedy(tied) == first


def test_a_delta_changes_what_it_holds_and_nothing_else(tied, tmp_path):
    pusher = tied.pusher()
    base = tied.status().version
    changed = {"model.norm.weight": tied.tensors["model.norm.weight"] * 1.5}
    layer = "model.layers.1.self_attn."
    changed |= {f"{layer}{one}_proj.weight": tied.tensors[f"{layer}{one}_proj.weight"] * 0.5 for one in "qkv"}
    digest = tied.model.model_digest
    pusher.push(changed, tied.next_version(), base=base, digest=digest)
    reference = Reference.of(tmp_path / "delta", tied.config, {**tied.tensors, **changed})
    answer = tied.generate(PROMPT, 16, ignore_eos=True)
    assert np.abs(answer.logprobs - reference.of_response(PROMPT, answer.tokens)).max() < 1e-5
    pusher.push(tied.tensors, tied.next_version())


def test_the_digest_is_that_of_the_tensors(moe):
    manifest, _ = manifest_of(moe.tensors, moe.next_version())
    assert moe.model.model_digest == manifest.model_digest == model_digest(manifest.tensors)


def test_commit_may_stay_paused(moe):
    from pushing import new_id

    manifest, parts = manifest_of(moe.tensors, moe.next_version())
    pusher = moe.pusher("stream")
    pusher.begin(manifest)
    pusher.load(manifest, parts)
    assert pusher.commit(manifest, stay_paused=True).status.state == pb.ENGINE_STATE_PAUSED
    moe.control.Resume(pb.ResumeRequest(request_id=new_id()), timeout=10)
