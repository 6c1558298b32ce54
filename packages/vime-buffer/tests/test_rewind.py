"""Restores: nothing lost, nothing trained twice in the lineage that is kept."""

import builders as b
import grpc
from client import ids, prompts_of

from vime_proto.buffer.v1 import buffer_pb2 as pb


async def test_acked_batches_come_back_as_they_were_and_dead_ones_are_asked_again(client):
    await client.open(batch_groups=2, group_size=1, max_staleness=1)
    await client.put(*"abcdefgh")
    batches = [await client.step(number) for number in range(1, 4)]
    # Batches 0 and 1 were answered by version 0, batch 2 by version 1.
    assert [[g.rollouts[0].samples[0].versions[0].version.number for g in one.groups] for one in batches] == [
        [0, 0],
        [0, 0],
        [1, 1],
    ]
    held = (await client.lease()).leases
    await client.open(batch_groups=2, group_size=1, max_staleness=1, lineage=b.lineage(1, 0, 1), publish=False)
    answer = await client.rewind(1)
    # Number 1 is the fork and lives; the groups that wait hold number 2, which is dead.
    assert (answer.batches_restored, answer.groups_expired) == (2, 2)
    assert await client.renew(*held) == [pb.LEASE_DIRECTIVE_ABORT] * len(held)
    again = await client.batch(incarnation="2")
    assert (again.batch_id, ids(again), again.ordinal) == (batches[1].batch_id, ids(batches[1]), 1)
    assert again.groups == batches[1].groups
    await client.ack(again)
    assert (await client.lease()).outcome == pb.LEASE_OUTCOME_EMPTY
    await client.publish(2, lineage=1)
    asked = await client.lease()
    assert prompts_of(asked) == ["g", "h"]
    assert asked.leases[0].minimum_version.lineage == 1
    last = await client.batch(incarnation="2")
    assert (last.batch_id, last.groups, last.ordinal) == (batches[2].batch_id, batches[2].groups, 2)


async def test_every_prompt_is_trained_exactly_once_in_the_kept_lineage(client):
    names = [f"p{i}" for i in range(12)]
    await client.open(batch_groups=2, group_size=1, max_staleness=1)
    await client.put(*names)
    trained = [ids(await client.step(number)) for number in (1, 2, 3)]
    # Three in flight and two finished but unused, then the trainer dies with a checkpoint of one batch.
    in_flight = (await client.lease(most=2)).leases
    await client.commit(in_flight[0])
    await client.open(batch_groups=2, group_size=1, max_staleness=1, lineage=b.lineage(1, 0, 1), publish=False)
    await client.rewind(1)
    await client.publish(1, lineage=1)
    kept = trained[:1]
    for number in range(2, 8):
        batch = await client.step(number, lineage=1)
        if batch.outcome != pb.LEASE_OUTCOME_GRANTED:
            break
        kept.append(ids(batch))
    assert sorted(sum(kept, [])) == sorted(names)
    assert kept[1] == trained[1]


async def test_a_batch_with_one_dead_group_keeps_the_live_one_first(client):
    await client.open(batch_groups=2, group_size=1, max_staleness=1)
    await client.put(*"abcdef")
    first = (await client.lease()).leases
    await client.commit(first[0])
    await client.commit(first[1])
    await client.ack(await client.batch())
    await client.publish(1)
    await client.commit(first[2])
    await client.commit(first[3], versions=((0, 1),))
    mixed = await client.batch()
    assert ids(mixed) == ["c", "d"]
    await client.ack(mixed)
    await client.open(batch_groups=2, group_size=1, max_staleness=1, lineage=b.lineage(1, 0, 0), publish=False)
    answer = await client.rewind(0)
    assert (answer.batches_restored, answer.groups_expired) == (1, 1)
    await client.publish(0, lineage=1)
    assert ids(await client.batch(incarnation="2")) == ["a", "b"]
    asked = (await client.lease()).leases
    assert [one.prompt.prompt_id for one in asked] == ["d"]


async def test_filtered_by_dead_weights_is_asked_again(start):
    async with start(group_filter="nonzero_std") as client:
        await client.open(batch_groups=1, group_size=2)
        await client.put(*"abcd")
        await client.step(1)
        lease = (await client.lease()).leases[0]
        answer = await client.commit(lease, rewards=[1.0, 1.0])
        assert (lease.prompt.prompt_id, answer.outcome) == ("b", pb.COMMIT_OUTCOME_FILTERED)
        await client.rewind(0)
        await client.publish(0, lineage=1)
        assert ids(await client.batch()) == ["a"]
        await client.ack(await client.batch(incarnation="2"))
        await client.publish(1, lineage=1)
        assert prompts_of(await client.lease()) == ["b"]


async def test_training_waits_for_the_rewind(client, refused):
    await client.open()
    answer = await client.open(lineage=b.lineage(1, 0, 0), publish=False)
    assert answer.existed and answer.trained == 0
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "Rewind"):
        await client.batch()
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "Rewind"):
        await client.publish(0, lineage=1)
    await client.rewind(0)
    await client.publish(0, lineage=1)
    assert (await client.batch()).outcome == pb.LEASE_OUTCOME_EMPTY


async def test_a_trainer_of_an_older_lineage_is_refused(client, refused):
    await client.open()
    await client.rewind(0)
    with refused(grpc.StatusCode.ABORTED, "superseded by 1"):
        await client.open(publish=False)
    with refused(grpc.StatusCode.ABORTED, "present lineage 1"):
        await client.publish(0, lineage=0)


async def test_dead_versions_are_not_taken_in(client):
    await client.open(batch_groups=1, group_size=1, max_staleness=3)
    await client.put(*"abcdef")
    await client.step(1, most=1)
    await client.step(2, most=1)
    await client.rewind(1)
    await client.publish(1, lineage=1)
    lease = (await client.lease(most=1)).leases[0]
    answer = await client.commit(lease, versions=((0, 2),))
    assert answer.outcome == pb.COMMIT_OUTCOME_EXPIRED and "dead lineage" in answer.reason
    lease = (await client.lease(most=1)).leases[0]
    assert (await client.commit(lease, versions=((0, 1), (1, 1)))).outcome == pb.COMMIT_OUTCOME_READY


async def test_collected_batches_are_gone_and_cannot_be_restored(client, refused):
    await client.open(batch_groups=1, group_size=1, max_staleness=3)
    await client.put(*"abcdef")
    batches = [await client.step(number) for number in (1, 2, 3)]
    samples = [one.groups[0].rollouts[0].samples[0].sample_id for one in batches]
    before = (await client.stats()).payload_bytes
    await client.checkpoint(3, 2)
    after = (await client.stats()).payload_bytes
    assert after == before - sum(one.groups[0].rollouts[0].samples[0].bytes for one in batches[:2])
    assert [one.status.code for one in await client.fetch(*samples)] == [5, 5, 0]
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "before 2", "collected"):
        await client.rewind(1)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "4 exceeds the 3"):
        await client.rewind(4)
    assert (await client.rewind(2)).batches_restored == 1
    assert ids(await client.batch(incarnation="2")) == ids(batches[2])


async def test_a_closed_run_is_taken_up_by_a_new_lineage(client):
    await client.open(batch_groups=1, group_size=1)
    await client.put("a", "b")
    await client.step(1)
    await client.close_run("the worker died")
    await client.open(batch_groups=1, group_size=1, lineage=b.lineage(1, 0, 1), publish=False)
    await client.rewind(1)
    await client.publish(1, lineage=1)
    assert prompts_of(await client.lease()) == ["b"]


async def test_a_history_that_began_in_another_buffer_goes_on(client):
    await client.open(batch_groups=1, group_size=1, lineage=b.lineage(3, 2, 7), publish=False)
    await client.rewind(7, ordinal=3, parent=2)
    await client.publish(7, lineage=3)
    await client.put("a")
    lease = (await client.lease()).leases[0]
    assert lease.minimum_version.number == 7
    await client.commit(lease)
    batch = await client.batch()
    assert batch.ordinal == 7 and (await client.ack(batch)).trained == 8


async def test_rewind_is_done_once(client):
    await client.open(batch_groups=1, group_size=1)
    await client.put("a", "b")
    await client.step(1)
    request = pb.RewindRequest(request_id="r", run_id=b.RUN, batch=0, lineage=b.lineage(1, 0, 0))
    first = await client.stub.Rewind(request)
    await client.publish(0, lineage=1)
    assert await client.stub.Rewind(request) == first
    assert (await client.stats()).version == 0
