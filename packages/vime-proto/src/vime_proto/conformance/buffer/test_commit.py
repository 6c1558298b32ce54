"""Committing groups: once, whole, checked."""

from __future__ import annotations

import numpy as np
import pytest

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.conformance._calls import ABORTED, INVALID, new_id, refused
from vime_proto.conformance.buffer.conftest import group_ids
from vime_proto.fakes import build
from vime_proto.sample.v1 import sample_pb2
from vime_proto.tensor import to_tensor


def test_a_commit_is_idempotent(buffer):
    buffer.ready("a")
    lease, request_id = buffer.lease_one(), new_id()
    first = buffer.commit(lease, request_id=request_id)
    assert buffer.commit(lease, request_id=request_id) == first
    assert buffer.stats().groups_committed_total == 1
    assert len(buffer.granted_batch().groups) == 1


def test_the_same_id_with_another_group_is_refused(buffer):
    buffer.ready("a")
    lease, request_id = buffer.lease_one(), new_id()
    buffer.commit(lease, request_id=request_id)
    with refused(INVALID, names=request_id):
        buffer.commit(lease, build.group(lease, buffer.version(0), [1.0, 1.0]), request_id=request_id)


def test_a_second_commit_of_one_lease_is_fenced(buffer):
    buffer.ready("a")
    lease = buffer.lease_one()
    buffer.commit(lease)
    with refused(ABORTED):
        buffer.commit(lease)


def test_another_attempt_than_the_leased_one_is_fenced(buffer):
    buffer.ready("a")
    lease = buffer.lease_one()
    with refused(ABORTED):
        buffer.commit(lease, attempt=2)
    assert buffer.commit(lease).outcome == pb.COMMIT_OUTCOME_READY


def test_a_group_of_failures_is_asked_again_and_dropped_in_the_end(buffer):
    buffer.ready("a", max_attempts=2)
    lease = buffer.lease_one()
    first = buffer.commit(lease, build.failed_group(lease, "reward"))
    assert first.outcome == pb.COMMIT_OUTCOME_RETRY and first.reason
    lease = buffer.lease_one()
    assert lease.attempt == 2
    assert buffer.commit(lease, build.failed_group(lease, "reward")).outcome == pb.COMMIT_OUTCOME_DROPPED
    stats = buffer.stats()
    assert stats.prompts_dropped_total == 1
    assert stats.rollouts_failed_total["reward"] == 2 * lease.group_size
    buffer.check_no_prompts_left()


def test_zeros_are_values_in_the_index(buffer):
    buffer.ready("a", group_size=2)
    lease = buffer.lease_one()
    group = build.group(lease, buffer.version(0), [0.0, 1.0])
    group.rollouts[1].ClearField("rewards")
    group.rollouts[1].reliable = False
    buffer.commit(lease, group)
    zero, one = buffer.granted_batch().groups[0].rollouts
    assert zero.HasField("reward") and zero.reward == 0.0 and dict(zero.rewards) == {"exact": 0.0}
    assert zero.reliable and not one.reliable
    (sample,) = zero.samples
    assert (sample.tokens, sample.trainable_tokens) == (5, 2)
    (spent,) = sample.versions
    assert spent.version.HasField("number") and spent.version == buffer.version(0) and spent.tokens == 2


def test_a_rollout_may_yield_several_samples_or_none(buffer):
    buffer.ready("a", group_size=2)
    lease = buffer.lease_one()
    group = build.group(lease, buffer.version(0))
    group.rollouts[0].samples.add().CopyFrom(build.sample("fan-out", buffer.version(0)))
    del group.rollouts[1].samples[:]
    assert buffer.commit(lease, group).outcome == pb.COMMIT_OUTCOME_READY
    index = buffer.granted_batch().groups[0]
    assert [len(rollout.samples) for rollout in index.rollouts] == [2, 0]


def test_an_empty_response_is_a_sample(buffer):
    buffer.ready("a")
    lease = buffer.lease_one()
    group = build.group(lease, buffer.version(0))
    sample = group.rollouts[0].samples[0]
    sample.segments[1].CopyFrom(build.model_segment(buffer.version(0), [], []))
    assert buffer.commit(lease, group).outcome == pb.COMMIT_OUTCOME_READY
    entry = buffer.granted_batch().groups[0].rollouts[0].samples[0]
    assert (entry.tokens, entry.trainable_tokens) == (3, 0)
    assert [(spent.version.number, spent.tokens) for spent in entry.versions] == [(0, 0)], "its version still counts"


def _nan(segment):
    segment.generation.logprobs.CopyFrom(build.floats([0.0, np.nan]))


def _infinite(segment):
    segment.generation.logprobs.CopyFrom(build.floats([-np.inf, 0.0]))


def _longer(segment):
    segment.generation.logprobs.CopyFrom(build.floats([0.0, 0.0, 0.0]))


def _double(segment):
    segment.generation.logprobs.CopyFrom(to_tensor(np.zeros(2)))


def _mask(segment):
    segment.trainable_mask.CopyFrom(to_tensor(np.ones(3, bool)))


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (_nan, "generation.logprobs"),
        (_infinite, "generation.logprobs"),
        (_longer, "generation.logprobs.shape"),
        (_double, "generation.logprobs.dtype"),
        (_mask, "trainable_mask.shape"),
        (lambda segment: segment.generation.ClearField("logprobs"), "generation.logprobs"),
        (lambda segment: segment.generation.ClearField("version"), "generation.version"),
        (lambda segment: segment.generation.version.ClearField("number"), "generation.version.number"),
        (lambda segment: segment.ClearField("generation"), "generation"),
        (lambda segment: segment.ClearField("role"), "role"),
    ],
)
def test_a_spoilt_sample_is_refused_by_name_and_the_lease_stays(buffer, spoil, field):
    buffer.ready("a")
    lease = buffer.lease_one()
    group = build.group(lease, buffer.version(0))
    sample = group.rollouts[1].samples[0]
    spoil(sample.segments[1])
    with refused(INVALID, field=field, names=sample.sample_id):
        buffer.commit(lease, group)
    assert buffer.commit(lease).outcome == pb.COMMIT_OUTCOME_READY, "a refused commit changes nothing"


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda group: group.rollouts.pop(), "rollouts"),
        (lambda group: group.rollouts[0].ClearField("reward"), "reward"),
        (lambda group: setattr(group.rollouts[0], "reward", float("nan")), "reward"),
        (lambda group: setattr(group.rollouts[0], "rollout_id", group.rollouts[1].rollout_id), "rollout_id"),
        (lambda group: setattr(group.rollouts[0], "status", sample_pb2.ROLLOUT_STATUS_FAILED), "failure"),
        (lambda group: setattr(group, "group_id", "other"), "group_id"),
    ],
)
def test_a_spoilt_group_is_refused_by_name(buffer, spoil, field):
    buffer.ready("a")
    lease = buffer.lease_one()
    group = build.group(lease, buffer.version(0))
    spoil(group)
    with refused(INVALID, field=field):
        buffer.commit(lease, group)


def test_groups_leave_first_in_first_out_and_none_is_lost(buffer):
    buffer.ready(*(f"p{i}" for i in range(10)), batch_groups=4, max_staleness=2)
    for lease in reversed(buffer.lease(10).leases):
        buffer.commit(lease)
    sizes, seen = [], []
    for step in range(3):
        batch = buffer.granted_batch()
        sizes.append(len(batch.groups))
        seen += group_ids(batch)
        assert buffer.ack(batch) == step + 1
        buffer.publish(step + 1)
    assert sizes == [4, 4, 2], "the last batch of the data may be short"
    assert sorted(seen) == sorted(f"p{i}" for i in range(10))
    assert set(seen[:4]) == {"p9", "p8", "p7", "p6"}
