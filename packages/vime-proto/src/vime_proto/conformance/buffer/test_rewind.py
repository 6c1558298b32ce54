"""Restores: nothing lost, nothing trained twice in the lineage that is kept."""

from __future__ import annotations

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.conformance._calls import ABORTED, INVALID, PRECONDITION, refused
from vime_proto.conformance.buffer.conftest import group_ids


def _run(buffer, steps: int, prompts: int = 12, **settings) -> list[pb.LeaseBatchResponse]:
    """`steps` whole on-policy steps; batch i is answered by version i."""
    buffer.ready(*(f"p{i}" for i in range(prompts)), **{"batch_groups": 2, **settings})
    return [buffer.train(step) for step in range(steps)]


def _reopen(buffer, batch: int, ordinal: int = 1, parent: int = 0, **settings) -> pb.RewindResponse:
    lineage = common.Lineage(ordinal=ordinal, parent=parent, forked_at=batch)
    assert buffer.open(lineage=lineage, **{"batch_groups": 2, **settings}).existed
    return buffer.rewind(batch, ordinal, parent)


def test_a_live_batch_comes_back_under_the_same_ids_groups_and_order(buffer):
    batches = _run(buffer, 2)
    answer = _reopen(buffer, 1)
    assert answer.batches_restored == 1 and answer.groups_expired == 0, "batch 1 was answered by version 1, which lives"
    buffer.publish(1, lineage=1)
    again = buffer.granted_batch()
    assert (again.batch_id, again.ordinal) == (batches[1].batch_id, 1)
    assert list(again.groups) == list(batches[1].groups)
    assert buffer.ack(again) == 2


def test_a_batch_of_dead_versions_expires_and_its_prompts_are_lent_again(buffer):
    batches = _run(buffer, 3)
    answer = _reopen(buffer, 1)
    assert (answer.batches_restored, answer.groups_expired) == (1, 2), (
        "batch 2 was answered by version 2, which is dead"
    )
    buffer.publish(1, lineage=1)
    assert group_ids(buffer.granted_batch()) == group_ids(batches[1])
    assert buffer.ack(buffer.granted_batch(incarnation="2")) == 2
    buffer.publish(2, lineage=1)
    lent = buffer.lease(2).leases
    assert sorted(lease.prompt.prompt_id for lease in lent) == sorted(group_ids(batches[2]))
    assert all(lease.attempt == 2 for lease in lent)
    assert all(lease.minimum_version.lineage == 1 for lease in lent)


def test_each_prompt_is_trained_once_in_the_lineage_that_is_kept(buffer):
    batches = _run(buffer, 3, prompts=10)
    leases = buffer.lease(2).leases
    buffer.commit(leases[0], number=3)
    _reopen(buffer, 1)
    buffer.publish(1, lineage=1)
    trained = group_ids(batches[0])
    while True:
        version = buffer.stats().version
        batch = buffer.batch()
        if batch.outcome == pb.LEASE_OUTCOME_END_OF_DATA:
            break
        if batch.outcome == pb.LEASE_OUTCOME_EMPTY:
            buffer.commit(buffer.lease_one(incarnation="2"), number=version, lineage=1)
            continue
        trained += group_ids(batch)
        buffer.publish(buffer.ack(batch), lineage=1)
    assert sorted(trained) == sorted(f"p{i}" for i in range(10))


def test_every_lease_ends_at_a_rewind(buffer):
    _run(buffer, 1)
    prompt = buffer.lease_one()
    _reopen(buffer, 1)
    assert buffer.renew(prompt.lease_id) == [pb.LEASE_DIRECTIVE_ABORT]
    with refused(ABORTED):
        buffer.commit(prompt, number=1)


def test_nothing_is_lent_before_the_new_lineage_published(buffer):
    _run(buffer, 1)
    _reopen(buffer, 1)
    assert buffer.lease().outcome == pb.LEASE_OUTCOME_EMPTY
    buffer.publish(1, lineage=1)
    assert buffer.lease().outcome == pb.LEASE_OUTCOME_GRANTED


def test_a_dead_version_is_not_taken_in(buffer):
    _run(buffer, 2)
    _reopen(buffer, 1)
    buffer.publish(1, lineage=1)
    buffer.ack(buffer.granted_batch())
    buffer.publish(2, lineage=1)
    lease = buffer.lease_one()
    assert buffer.commit(lease, number=2, lineage=0).outcome == pb.COMMIT_OUTCOME_EXPIRED
    again = buffer.lease_one()
    assert again.prompt == lease.prompt
    assert buffer.commit(again, number=2, lineage=1).outcome == pb.COMMIT_OUTCOME_READY


def test_a_version_of_the_parent_up_to_the_fork_is_alive(buffer):
    _run(buffer, 1, max_staleness=1)
    _reopen(buffer, 1, max_staleness=1)
    buffer.publish(1, lineage=1)
    assert buffer.commit(buffer.lease_one(), number=1, lineage=0).outcome == pb.COMMIT_OUTCOME_READY


def test_the_old_lineage_cannot_go_on(buffer):
    _run(buffer, 2)
    _reopen(buffer, 1)
    with refused(ABORTED, INVALID, PRECONDITION):
        buffer.publish(2, lineage=0)
    with refused(ABORTED, INVALID, PRECONDITION):
        buffer.open(batch_groups=2, lineage=common.Lineage(ordinal=0))


def test_a_restore_of_a_restore(buffer):
    _run(buffer, 3)
    _reopen(buffer, 2)
    buffer.publish(2, lineage=1)
    answer = _reopen(buffer, 1, ordinal=2, parent=1)
    assert (answer.batches_restored, answer.groups_expired) == (1, 2)
    opened = buffer.open(batch_groups=2, lineage=common.Lineage(ordinal=2, parent=1, forked_at=1))
    assert opened.trained == 1 and opened.lineage.ordinal == 2


def test_rewinding_to_the_start_keeps_what_the_first_weights_answered(buffer):
    batches = _run(buffer, 2)
    answer = _reopen(buffer, 0)
    assert (answer.batches_restored, answer.groups_expired) == (1, 2)
    buffer.publish(0, lineage=1)
    again = buffer.granted_batch()
    assert again.HasField("ordinal") and again.ordinal == 0 and again.batch_id == batches[0].batch_id


def test_a_batch_that_was_never_acked_cannot_be_restored(buffer):
    _run(buffer, 1)
    lineage = common.Lineage(ordinal=1, parent=0, forked_at=5)
    with refused(INVALID, PRECONDITION):
        buffer.open(batch_groups=2, lineage=lineage)
        buffer.rewind(5)


def test_collected_batches_cannot_be_restored(buffer):
    _run(buffer, 3)
    buffer.call("ReportCheckpoint", pb.ReportCheckpointRequest, batch=3, oldest_restorable=2)
    with refused(PRECONDITION, INVALID):
        _reopen(buffer, 1)


def test_a_checkpoint_keeps_what_it_needs(buffer):
    batches = _run(buffer, 3)
    buffer.call("ReportCheckpoint", pb.ReportCheckpointRequest, batch=3, oldest_restorable=2)
    answer = _reopen(buffer, 2)
    assert answer.batches_restored == 1
    buffer.publish(2, lineage=1)
    again = buffer.granted_batch()
    assert group_ids(again) == group_ids(batches[2])
    sample_id = again.groups[0].rollouts[0].samples[0].sample_id
    (sample,) = buffer.fetch(sample_id)
    assert sample.status.code == 0


def test_checkpoint_numbers_must_fit(buffer):
    _run(buffer, 1)
    for batch, oldest in ((2, 0), (1, 2)):
        with refused(INVALID):
            buffer.call("ReportCheckpoint", pb.ReportCheckpointRequest, batch=batch, oldest_restorable=oldest)
