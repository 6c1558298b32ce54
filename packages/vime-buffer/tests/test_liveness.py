"""The loop goes on under every setting: a fake worker and a fake trainer run at once, as the real ones do."""

import asyncio

import pytest

from vime_buffer.settings import PromptFile
from vime_proto.buffer.v1 import buffer_pb2 as pb


class Weights:
    """What the engines hold."""

    number = 0


async def _worker(client, weights, delays):
    """Leases, answers with the present weights in an order of its own, commits; ends with the data."""
    pending = set()
    steps = 0
    while True:
        response = await client.lease(most=3, wait=0.2)
        if response.outcome == pb.LEASE_OUTCOME_END_OF_DATA:
            break
        for lease in response.leases:
            steps += 1
            assert weights.number >= lease.minimum_version.number, "the gate asked for weights that do not exist yet"
            pending.add(asyncio.ensure_future(_answer(client, lease, weights.number, delays[steps % len(delays)])))
    await asyncio.gather(*pending)


async def _answer(client, lease, number, delay):
    await asyncio.sleep(delay)
    await client.commit(lease, versions=((0, number),))


async def _trainer(client, weights, max_steps, publish_interval):
    """As the trainer does: update the engines every so many batches, then ack, then publish."""
    ages = []
    for step in range(max_steps):
        batch = await client.batch(wait=30)
        assert batch.outcome == pb.LEASE_OUTCOME_GRANTED, pb.LeaseOutcome.Name(batch.outcome)
        assert batch.ordinal == step
        numbers = [g.rollouts[0].samples[0].versions[0].version.number for g in batch.groups]
        ages.append(step - min(numbers))
        due = (step + 1) % publish_interval == 0
        if due:
            weights.number = step + 1
        await client.ack(batch)
        if due:
            await client.publish(step + 1)
    await client.close_run()
    return ages


@pytest.mark.parametrize("max_steps", [1, 2, 3, 7])
@pytest.mark.parametrize("staleness, interval", [(0, 1), (1, 1), (1, 2), (2, 1), (2, 3), (4, 5), (5, 2)])
async def test_every_combination_finishes(start, jsonl, max_steps, staleness, interval):
    path = jsonl("x.jsonl", [{"prompt": f"q{i}"} for i in range(50)])
    weights = Weights()
    async with start(prompts=[PromptFile(path=path)]) as client:
        await client.open(
            batch_groups=4, group_size=1, max_staleness=staleness, publish_interval=interval, seed=1, max_attempts=99
        )
        worker = asyncio.ensure_future(_worker(client, weights, [0.0, 0.004, 0.001, 0.012]))
        ages = await asyncio.wait_for(_trainer(client, weights, max_steps, interval), 60)
        # Leases that the close ended are refused; nothing else may go wrong in the worker.
        (outcome,) = await asyncio.wait_for(asyncio.gather(worker, return_exceptions=True), 10)
        assert outcome is None or "closed" in str(outcome), outcome
        stats = await client.stats()
    assert len(ages) == max_steps and max(ages) <= staleness
    assert stats.batches_trained == max_steps and stats.prompts_dropped_total == 0


async def test_off_policy_runs_show_their_staleness(start, jsonl):
    path = jsonl("x.jsonl", [{"prompt": f"q{i}"} for i in range(50)])
    seen = {}
    for staleness in (0, 1):
        weights = Weights()
        async with start(prompts=[PromptFile(path=path)], database=f"{path}.{staleness}.db") as client:
            await client.open(batch_groups=4, group_size=1, max_staleness=staleness)
            worker = asyncio.ensure_future(_worker(client, weights, [0.0]))
            seen[staleness] = await asyncio.wait_for(_trainer(client, weights, 5, 1), 60)
            await asyncio.gather(worker, return_exceptions=True)
    assert max(seen[0]) == 0 and max(seen[1]) == 1


async def test_failures_and_filters_do_not_stop_the_loop(start, jsonl):
    """Every third group fails for good and every fifth is filtered; batches stay full until the data ends."""
    path = jsonl("x.jsonl", [{"prompt": f"q{i}"} for i in range(30)])
    async with start(prompts=[PromptFile(path=path)], group_filter="nonzero_std") as client:
        await client.open(batch_groups=4, group_size=2, epochs=1, max_attempts=2)
        sizes = []
        while True:
            batch = await client.batch()
            if batch.outcome == pb.LEASE_OUTCOME_END_OF_DATA:
                break
            if batch.outcome == pb.LEASE_OUTCOME_GRANTED:
                sizes.append(len(batch.groups))
                await client.publish((await client.ack(batch)).trained)
            for lease in (await client.lease()).leases:
                row = lease.prompt.row
                await client.commit(lease, failed=2 * (row % 3 == 0), rewards=[1.0, 1.0] if row % 5 == 0 else None)
        stats = await client.stats()
    kept = sum(1 for row in range(30) if row % 3 and row % 5)
    assert sum(sizes) == kept and set(sizes[:-1]) == {4}
    assert (stats.prompts_dropped_total, stats.groups_filtered_total["zero_std"]) == (10, 4)
    assert stats.rollouts_failed_total["reward"] == 40
