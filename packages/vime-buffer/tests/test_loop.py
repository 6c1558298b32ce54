"""The whole way of prompts and groups, in one process."""

import asyncio

import builders as b
import grpc
from client import ids, prompts_of

from vime_proto.buffer.v1 import buffer_pb2 as pb


async def test_lease_commit_batch_fetch_ack(client):
    await client.open(batch_groups=2, group_size=2)
    await client.put("a", "b", "c")
    leases = (await client.lease()).leases
    assert [one.prompt.prompt_id for one in leases] == ["a", "b"]
    assert [one.attempt for one in leases] == [1, 1] and leases[0].minimum_version.number == 0
    for lease in leases:
        assert (await client.commit(lease)).outcome == pb.COMMIT_OUTCOME_READY
    batch = await client.batch()
    assert batch.outcome == pb.LEASE_OUTCOME_GRANTED and batch.ordinal == 0
    assert ids(batch) == ["a", "b"]
    index = batch.groups[0].rollouts[0]
    assert index.HasField("reward") and index.reward == 0.0 and index.reliable
    assert (index.samples[0].tokens, index.samples[0].trainable_tokens) == (7, 4)
    assert [(v.version.number, v.tokens) for v in index.samples[0].versions] == [(0, 4)]
    wanted = [one.sample_id for group in batch.groups for rollout in group.rollouts for one in rollout.samples]
    answers = await client.fetch(*wanted, "nobody")
    assert [one.sample.sample_id for one in answers] == [*wanted, "nobody"]
    assert [one.status.code for one in answers] == [0] * 4 + [grpc.StatusCode.NOT_FOUND.value[0]]
    assert (await client.ack(batch)).trained == 1
    assert (await client.lease()).outcome == pb.LEASE_OUTCOME_EMPTY
    await client.publish(1)
    again = await client.lease()
    assert prompts_of(again) == ["c"] and again.leases[0].minimum_version.number == 1


async def test_ten_groups_leave_in_batches_of_four_four_two_in_order(client):
    await client.open(batch_groups=4, group_size=1, max_staleness=2)
    names = [f"p{i}" for i in range(10)]
    await client.put(*names)
    for lease in (await client.lease()).leases:
        await client.commit(lease)
    seen = []
    for number in range(3):
        batch = await client.batch()
        seen.append(ids(batch))
        await client.ack(batch)
        await client.publish(number + 1)
    assert [len(one) for one in seen] == [4, 4, 2]
    assert sum(seen, []) == names
    assert (await client.batch()).outcome == pb.LEASE_OUTCOME_END_OF_DATA


async def test_a_batch_is_short_only_at_the_end_of_the_data(client):
    await client.open(batch_groups=3, group_size=1)
    await client.put("a", "b")
    leases = (await client.lease()).leases
    await client.commit(leases[0])
    assert (await client.batch()).outcome == pb.LEASE_OUTCOME_EMPTY
    await client.commit(leases[1])
    assert ids(await client.batch()) == ["a", "b"]


async def test_long_polls_answer_when_something_happens(client):
    await client.open(batch_groups=1, group_size=1)
    waiting = asyncio.create_task(client.lease(wait=20))
    training = asyncio.create_task(client.batch(wait=20))
    await client.put("a")
    lease = (await asyncio.wait_for(waiting, 30)).leases[0]
    await client.commit(lease)
    assert ids(await asyncio.wait_for(training, 30)) == ["a"]


async def test_closing_a_run_ends_everything(client, refused):
    await client.open(batch_groups=1, group_size=1)
    await client.put("a", "b")
    lease = (await client.lease()).leases[0]
    waiting = asyncio.create_task(client.lease(wait=20))
    training = asyncio.create_task(client.batch(wait=20))
    await client.close_run("stopped")
    assert (await asyncio.wait_for(waiting, 30)).outcome == pb.LEASE_OUTCOME_END_OF_DATA
    assert (await asyncio.wait_for(training, 30)).outcome == pb.LEASE_OUTCOME_END_OF_DATA
    assert await client.renew(lease) == [pb.LEASE_DIRECTIVE_ABORT]
    with refused(grpc.StatusCode.ABORTED, lease.lease_id, "closed"):
        await client.commit(lease)
    assert (await client.stats()).closed


async def test_nothing_is_granted_before_the_first_publication(client):
    await client.open(publish=False)
    await client.put("a")
    assert (await client.lease()).outcome == pb.LEASE_OUTCOME_EMPTY
    await client.publish(0)
    assert prompts_of(await client.lease()) == ["a"]


async def test_capacity_counts_what_is_leased_ready_and_batched(client):
    await client.open(batch_groups=2, group_size=1, max_staleness=1)
    await client.put(*"abcdefgh")
    first = (await client.lease()).leases
    assert len(first) == 4 and (await client.stats()).capacity == 0
    for lease in first:
        await client.commit(lease)
    stats = await client.stats()
    assert (stats.groups_ready, stats.capacity) == (4, 0)
    batch = await client.batch()
    stats = await client.stats()
    assert (stats.groups_ready, stats.groups_batch_leased, stats.capacity) == (2, 2, 0)
    await client.ack(batch)
    assert (await client.stats()).capacity == 0
    await client.publish(1)
    assert (await client.stats()).capacity == 2


async def test_versions_must_be_acked_and_rise(client, refused):
    await client.open()
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "version.number", "exceeds"):
        await client.publish(1)
    with refused(grpc.StatusCode.ABORTED, "lineage"):
        await client.publish(0, lineage=3)


async def test_unknown_run_is_named(client, refused):
    with refused(grpc.StatusCode.NOT_FOUND, "'run'", "OpenRun"):
        await client.stats()


async def test_publishing_rarely_needs_staleness(client, refused):
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "max_staleness", "5"):
        await client.open(publish_interval=5, max_staleness=3)
    await client.open(publish_interval=5, max_staleness=4)


async def test_run_cannot_be_taken_up_with_other_settings(client, refused):
    assert not (await client.open(group_size=2)).existed
    assert (await client.open(group_size=2)).existed
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "group_size is 2, not 3"):
        await client.open(group_size=3)


async def test_prompt_with_another_content_is_refused_alone(client):
    await client.open()
    await client.put("a", "b")
    answer = await client.stub.PutPrompts(
        pb.PutPromptsRequest(
            request_id=b.rid(),
            run_id=b.RUN,
            prompts=[b.prompt("a"), b.prompt("b", dataset="other"), b.prompt("c"), b.s.Prompt(prompt_id="d")],
        )
    )
    assert [one.code for one in answer.statuses] == [
        0,
        grpc.StatusCode.ALREADY_EXISTS.value[0],
        0,
        grpc.StatusCode.INVALID_ARGUMENT.value[0],
    ]
    assert "'b'" in answer.statuses[1].message and "'d'" in answer.statuses[3].message
    assert prompts_of(await client.lease()) == ["a", "b"]


async def test_without_evaluation_sets_nothing_can_follow_the_data(client):
    await client.open(batch_groups=1, group_size=1, epochs=1)
    await client.put("a")
    lease = (await client.lease()).leases[0]
    assert (await client.lease(wait=0.1)).outcome == pb.LEASE_OUTCOME_EMPTY, "the prompt on loan may come back"
    await client.commit(lease)
    batch = await client.batch()
    assert (await client.lease(wait=0.1)).outcome == pb.LEASE_OUTCOME_EMPTY, "the batch on loan may come back"
    await client.ack(batch)
    assert (await client.lease(wait=0.1)).outcome == pb.LEASE_OUTCOME_END_OF_DATA
