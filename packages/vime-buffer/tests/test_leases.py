"""Leases: time to live, incarnations, fencing, repeated requests."""

import asyncio

import builders as b
import grpc
import pytest
from client import ids, prompts_of

from vime_proto.buffer.v1 import buffer_pb2 as pb


async def _two_leases(client):
    await client.open(batch_groups=2, group_size=1)
    await client.put("a", "b")
    return (await client.lease()).leases


async def test_a_lapsed_lease_is_fenced_and_its_prompt_leased_again(client, clock, refused):
    lease, _ = await _two_leases(client)
    clock.now += 61
    with refused(grpc.StatusCode.ABORTED, lease.lease_id, "lapsed"):
        await client.commit(lease)
    again = await client.lease(holder="other")
    assert prompts_of(again) == ["a", "b"] and again.leases[0].attempt == 2
    with refused(grpc.StatusCode.ABORTED, lease.lease_id):
        await client.commit(lease)
    assert (await client.stats()).leases_lapsed_total == 2
    assert (await client.commit(again.leases[0])).outcome == pb.COMMIT_OUTCOME_READY


async def test_renewed_leases_live_on(client, clock):
    kept, lost = await _two_leases(client)
    for _ in range(5):
        clock.now += 50
        assert await client.renew(kept) == [pb.LEASE_DIRECTIVE_CONTINUE]
    assert await client.renew(kept, lost) == [pb.LEASE_DIRECTIVE_CONTINUE, pb.LEASE_DIRECTIVE_ABORT]
    assert (await client.commit(kept)).outcome == pb.COMMIT_OUTCOME_READY


async def test_leases_lapse_without_any_call(start, tmp_path):
    """The housekeeper wakes long polls when a lease lapses."""
    from client import Client

    from vime_buffer import BufferServer, BufferSettings

    server = await BufferServer.start(BufferSettings(database=str(tmp_path / "x.db"), lease_ttl_seconds=0.2))
    client = await Client.connect(server.address)
    await client.open(batch_groups=1, group_size=1)
    await client.put("a")
    await client.lease()
    answer = await asyncio.wait_for(client.lease(wait=60, holder="other"), 60)
    assert prompts_of(answer) == ["a"] and answer.leases[0].attempt == 2
    await client.close()
    await server.stop(0)


async def test_a_new_incarnation_takes_over_at_once(client, refused):
    lease, _ = await _two_leases(client)
    again = await client.lease(incarnation="2")
    assert prompts_of(again) == ["a", "b"]
    with refused(grpc.StatusCode.ABORTED, lease.lease_id, "incarnation"):
        await client.commit(lease)
    with refused(grpc.StatusCode.ABORTED, "incarnation '1'", "'worker'"):
        await client.lease(incarnation="1")
    for lease in again.leases:
        await client.commit(lease)
    batch = await client.batch()
    second = await client.batch(incarnation="2")
    assert (second.batch_id, ids(second), second.ordinal) == (batch.batch_id, ids(batch), 0)
    with refused(grpc.StatusCode.ABORTED, batch.lease_id):
        await client.ack(batch)
    assert (await client.ack(second)).trained == 1


async def test_incarnations_of_other_holders_are_left_alone(client):
    leases = await _two_leases(client)
    await client.lease(holder="other", incarnation="9")
    assert await client.renew(*leases) == [pb.LEASE_DIRECTIVE_CONTINUE] * 2


async def test_wrong_attempt_is_fenced(client, refused):
    lease, _ = await _two_leases(client)
    lease.attempt = 2
    with refused(grpc.StatusCode.ABORTED, "attempt 1", "'a'"):
        await client.commit(lease)


async def test_repeated_requests_get_the_first_answer(client, refused):
    await client.open(batch_groups=2, group_size=1)
    await client.put("a", "b", "c")
    first = await client.lease(most=1, request_id="x")
    assert await client.lease(most=1, request_id="x") == first
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "request_id", "another payload"):
        await client.lease(most=2, request_id="x")
    request = client.commit_request(first.leases[0])
    answers = await asyncio.gather(*(client.stub.CommitGroup(request) for _ in range(5)))
    assert all(one == answers[0] for one in answers)
    assert (await client.stats()).groups_committed_total == 1
    await client.commit((await client.lease()).leases[0])
    batch = await client.batch()
    ack = pb.AckBatchRequest(request_id="ack", run_id=b.RUN, lease_id=batch.lease_id)
    assert (await client.stub.AckBatch(ack)).trained == 1
    assert (await client.stub.AckBatch(ack)).trained == 1
    assert (await client.stats()).batches_trained == 1


async def test_an_empty_answer_does_not_stick_to_its_request(client):
    await client.open(batch_groups=1, group_size=1)
    assert (await client.lease(request_id="x")).outcome == pb.LEASE_OUTCOME_EMPTY
    await client.put("a")
    assert prompts_of(await client.lease(request_id="x")) == ["a"]


@pytest.mark.parametrize("failed", [False, True])
async def test_released_prompt_comes_back_first_and_pristine(client, failed):
    """A group that is given back without partial rollouts is asked again exactly as it was."""
    await client.open(batch_groups=2, group_size=1)
    await client.put("a", "b", "c")
    first = (await client.lease()).leases
    await client.release(first[0], failed=failed)
    again = (await client.lease()).leases[0]
    assert again.prompt == first[0].prompt and again.attempt == 2 and not again.partial
    await client.commit(again)
    await client.commit(first[1])
    batch = await client.batch()
    assert ids(batch) == ["a", "b"]
    assert [len(sample.versions) for sample in batch.groups[0].rollouts[0].samples] == [1]


async def test_partial_rollouts_come_with_the_next_attempt_while_fresh(client):
    await client.open(batch_groups=1, group_size=1, max_staleness=1)
    await client.put("a", "b")
    first = (await client.lease(most=1)).leases[0]
    partial = b.s.Rollout(rollout_id="half", status=b.s.ROLLOUT_STATUS_ABORTED, samples=[b.sample("half-s")])
    await client.release(first, partial=[partial])
    again = (await client.lease(most=1)).leases[0]
    assert list(again.partial) == [partial]
    await client.release(again)
    assert not (await client.lease(most=1)).leases[0].partial


async def test_releasing_a_hundred_times_leaves_the_capacity_as_it_was(client):
    await client.open(batch_groups=5, group_size=1)
    await client.put(*"abcde")
    for _ in range(100):
        for lease in (await client.lease()).leases:
            await client.release(lease)
    stats = await client.stats()
    assert (stats.capacity, stats.prompts_leased, stats.prompts_dropped_total) == (5, 0, 0)
    leases = (await client.lease()).leases
    for lease in leases[:3]:
        await client.release(lease)
    assert (await client.stats()).capacity == 3


async def test_lease_arguments_are_checked(client, refused):
    await client.open()
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "holder"):
        await client.lease(holder="")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "max_prompts"):
        await client.lease(most=0)
