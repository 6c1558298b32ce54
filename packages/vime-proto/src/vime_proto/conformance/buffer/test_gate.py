"""The staleness gate: leased + ready + batch-leased <= (max_staleness + 1 - (trained - version)) x batch."""

from __future__ import annotations

import pytest

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.fakes import build


def test_nothing_is_granted_before_the_first_publication(buffer):
    buffer.open()
    buffer.put("a")
    assert buffer.lease().outcome == pb.LEASE_OUTCOME_EMPTY


@pytest.mark.parametrize(("batch", "staleness"), [(1, 0), (3, 0), (2, 1), (2, 3)])
def test_at_the_start_the_gate_grants_staleness_plus_one_batches(buffer, batch, staleness):
    buffer.ready(*(f"p{i}" for i in range(20)), batch_groups=batch, max_staleness=staleness)
    assert buffer.stats().capacity == batch * (staleness + 1)
    assert len(buffer.lease(100).leases) == batch * (staleness + 1)
    assert buffer.lease().outcome == pb.LEASE_OUTCOME_EMPTY
    assert buffer.stats().capacity == 0


def test_ready_and_batch_leased_groups_count(buffer):
    buffer.ready(*(f"p{i}" for i in range(8)), batch_groups=2, max_staleness=1)
    leases = buffer.lease(4).leases
    for lease in leases[:3]:
        buffer.commit(lease)
    assert buffer.lease().outcome == pb.LEASE_OUTCOME_EMPTY
    buffer.granted_batch()
    assert buffer.lease().outcome == pb.LEASE_OUTCOME_EMPTY


def test_an_ack_alone_does_not_widen_the_gate(buffer):
    buffer.ready(*(f"p{i}" for i in range(8)), batch_groups=2, max_staleness=0)
    for lease in buffer.lease(2).leases:
        buffer.commit(lease)
    buffer.ack(buffer.granted_batch())
    assert buffer.lease().outcome == pb.LEASE_OUTCOME_EMPTY, "trained 1, version 0, staleness 0: no room"
    buffer.publish(1)
    assert len(buffer.lease(100).leases) == 2


def test_with_rare_publication_the_gate_closes_batch_by_batch(buffer):
    buffer.ready(*(f"p{i}" for i in range(9)), batch_groups=1, max_staleness=2, publish_interval=3)
    for trained in range(3):
        assert buffer.stats().capacity == 3 - trained
        buffer.commit(buffer.lease_one())
        buffer.ack(buffer.granted_batch())
    assert buffer.stats().capacity == 0
    buffer.publish(3)
    assert buffer.stats().capacity == 3


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_every_lag_and_length_reaches_the_end_of_data(buffer, staleness, steps):
    buffer.ready(*(f"p{i}" for i in range(2 * steps)), batch_groups=2, max_staleness=staleness)
    for step in range(steps):
        batch = buffer.train(step)
        assert batch.ordinal == step and len(batch.groups) == 2
    assert buffer.batch().outcome == pb.LEASE_OUTCOME_END_OF_DATA
    buffer.check_no_prompts_left()


def test_an_interval_of_five_with_one_batch_ahead_runs(buffer):
    buffer.ready(*(f"p{i}" for i in range(10)), batch_groups=1, max_staleness=5, publish_interval=5)
    for step in range(10):
        buffer.commit(buffer.lease_one(), number=step // 5 * 5)
        assert buffer.ack(buffer.granted_batch()) == step + 1
        if (step + 1) % 5 == 0:
            buffer.publish(step + 1)


def test_the_minimum_version_rises_with_what_is_under_way(buffer):
    buffer.ready(*(f"p{i}" for i in range(9)), batch_groups=1, max_staleness=1)
    buffer.train(0)
    leases = buffer.lease(2).leases
    assert [lease.minimum_version.number for lease in leases] == sorted(
        lease.minimum_version.number for lease in leases
    )
    assert all(0 <= lease.minimum_version.number <= 1 for lease in leases), "never above what is published"


def test_a_group_older_than_the_bound_expires_and_its_prompt_is_lent_again(buffer):
    buffer.ready("a", "b", "c", batch_groups=1, max_staleness=0)
    buffer.train(0)
    lease = buffer.lease_one()
    answer = buffer.commit(lease, number=0)
    assert answer.outcome == pb.COMMIT_OUTCOME_EXPIRED and answer.reason
    assert buffer.batch().outcome == pb.LEASE_OUTCOME_EMPTY
    again = buffer.lease_one()
    assert again.prompt == lease.prompt and again.attempt == 2
    assert buffer.stats().groups_expired_total == 1


def test_a_sample_is_as_old_as_its_oldest_segment(buffer):
    buffer.ready("a", "b", "c", batch_groups=1, max_staleness=0)
    buffer.train(0)
    lease = buffer.lease_one()
    group = build.group(lease, buffer.version(1))
    newest = group.rollouts[0].samples[0].segments[1]
    group.rollouts[0].samples[0].segments.insert(1, build.model_segment(buffer.version(0)))
    assert newest.generation.version.number == 1
    assert buffer.commit(lease, group).outcome == pb.COMMIT_OUTCOME_EXPIRED


def test_a_lease_past_the_bound_is_told_to_abort(buffer):
    buffer.ready(*(f"p{i}" for i in range(6)), batch_groups=1, max_staleness=1)
    slow, quick = buffer.lease(2).leases
    buffer.commit(quick)
    for number in (1, 2):
        buffer.publish(buffer.ack(buffer.granted_batch()))
        if number == 1:
            buffer.commit(buffer.lease_one(holder="two"), number=1)
    assert buffer.renew(slow.lease_id) == [pb.LEASE_DIRECTIVE_ABORT], "granted at version 0, two batches are trained"


def test_a_ready_group_that_became_too_old_is_never_handed_out(buffer):
    buffer.ready(*(f"p{i}" for i in range(8)), batch_groups=2, max_staleness=1)
    old, *rest = buffer.lease(4).leases
    for lease in rest[:2]:
        buffer.commit(lease)
    buffer.publish(buffer.ack(buffer.granted_batch()))
    for lease in buffer.lease(2, holder="two").leases:
        buffer.commit(lease, number=1)
    buffer.publish(buffer.ack(buffer.granted_batch()))
    buffer.commit(old, number=0)
    buffer.commit(rest[2], number=1)
    seen = [group.group_id for group in buffer.batch().groups]
    assert old.prompt.prompt_id not in seen
