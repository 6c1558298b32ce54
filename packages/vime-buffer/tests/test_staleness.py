"""Old groups, failed groups, filtered groups."""

import builders as b
import grpc
import numpy as np
import pytest
from client import ids, prompts_of

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.tensor import to_tensor


async def test_a_group_that_is_too_old_expires_and_its_prompt_is_leased_again(client):
    await client.open(batch_groups=1, group_size=1, max_staleness=1, max_attempts=9)
    await client.put(*"abc")
    slow, fast = (await client.lease()).leases
    await client.commit(fast)
    await client.ack(await client.batch())
    await client.publish(1)
    third = (await client.lease()).leases[0]
    await client.commit(third)
    await client.ack(await client.batch())
    await client.publish(2)
    assert await client.renew(slow) == [pb.LEASE_DIRECTIVE_ABORT]
    with_old = (await client.lease()).leases[0]
    assert with_old.prompt.prompt_id == "a"
    answer = await client.commit(with_old, versions=((0, 0), (0, 2)))
    assert answer.outcome == pb.COMMIT_OUTCOME_EXPIRED and "version 0" in answer.reason
    stats = await client.stats()
    assert stats.groups_expired_total == 2 and stats.prompts_requeued == 1
    assert prompts_of(await client.lease()) == ["a"]


async def test_a_waiting_group_is_never_handed_out_too_old(client):
    """The trainer may not train on groups of versions beyond the bound, even if they waited for it."""
    await client.open(batch_groups=1, group_size=1, max_staleness=2)
    await client.put(*"abc")
    for lease in (await client.lease()).leases:
        await client.commit(lease)
    # One by one: a and b stay within the bound, c would be trained as batch 2 and is still allowed.
    for _ in range(2):
        await client.ack(await client.batch())
    batch = await client.batch()
    assert ids(batch) == ["c"]
    await client.nack(batch)
    await client.server.core.database.run(lambda tx: _set_trained(tx, 3))
    assert (await client.batch()).outcome == pb.LEASE_OUTCOME_EMPTY
    assert (await client.stats()).groups_expired_total == 1


def _set_trained(tx, number):
    from vime_buffer._store import runs

    runs.update(tx, b.RUN, trained=number, version=number)


async def test_age_counts_from_the_oldest_segment(client):
    await client.open(batch_groups=1, group_size=1, max_staleness=4)
    await client.put(*"abc")
    await client.server.core.database.run(lambda tx: _set_trained(tx, 8))
    lease = (await client.lease(most=1)).leases[0]
    answer = await client.commit(lease, versions=((0, 3), (0, 5), (0, 7)))
    assert answer.outcome == pb.COMMIT_OUTCOME_EXPIRED
    lease = (await client.lease(most=1)).leases[0]
    assert (await client.commit(lease, versions=((0, 4), (0, 5), (0, 7)))).outcome == pb.COMMIT_OUTCOME_READY
    (sample,) = (await client.batch()).groups[0].rollouts[0].samples
    assert [(one.version.number, one.tokens) for one in sample.versions] == [(4, 4), (5, 4), (7, 4)]


async def test_an_environment_that_always_fails_is_dropped_after_its_attempts(client):
    await client.open(batch_groups=1, group_size=2, max_attempts=3)
    await client.put("bad", "good")
    outcomes = []
    for _ in range(3):
        lease = (await client.lease()).leases[0]
        assert lease.prompt.prompt_id == "bad"
        answer = await client.commit(lease, failed=2)
        outcomes.append(answer.outcome)
        assert "grader died" in answer.reason
    assert outcomes == [pb.COMMIT_OUTCOME_RETRY] * 2 + [pb.COMMIT_OUTCOME_DROPPED]
    stats = await client.stats()
    assert stats.prompts_dropped_total == 1 and dict(stats.rollouts_failed_total) == {"reward": 6}
    assert prompts_of(await client.lease()) == ["good"]


async def test_leases_given_back_as_failed_count_as_attempts(client):
    await client.open(batch_groups=1, group_size=1, max_attempts=2)
    await client.put("bad", "good")
    for _ in range(2):
        await client.release((await client.lease()).leases[0], failed=True)
    assert prompts_of(await client.lease()) == ["good"]
    assert (await client.stats()).prompts_dropped_total == 1


async def test_unreliable_rollouts_are_taken_and_marked(client):
    await client.open(batch_groups=1, group_size=2)
    await client.put("a")
    lease = (await client.lease()).leases[0]
    group = b.group(lease)
    group.rollouts[1].reliable = False
    assert (await client.commit(lease, group)).outcome == pb.COMMIT_OUTCOME_READY
    assert [one.reliable for one in (await client.batch()).groups[0].rollouts] == [True, False]


async def test_some_failed_rollouts_may_be_allowed(start):
    async with start(max_failed_rollouts=1) as client:
        await client.open(batch_groups=1, group_size=2)
        await client.put("a")
        lease = (await client.lease()).leases[0]
        assert (await client.commit(lease, failed=1)).outcome == pb.COMMIT_OUTCOME_READY
        statuses = [one.status for one in (await client.batch()).groups[0].rollouts]
        assert statuses == [b.s.ROLLOUT_STATUS_FAILED, b.s.ROLLOUT_STATUS_COMPLETED]


def _nan(group):
    logprobs = np.array([-1, np.nan, -1, -1], np.float32)
    group.rollouts[1].samples[0].segments[1].generation.logprobs.CopyFrom(to_tensor(logprobs))


def _short(group):
    group.rollouts[1].samples[0].segments[1].generation.logprobs.CopyFrom(to_tensor(np.zeros(3, np.float32)))


def _no_version(group):
    group.rollouts[1].samples[0].segments[1].generation.ClearField("version")


def _other_run(group):
    group.rollouts[1].samples[0].segments[1].generation.version.run_id = "elsewhere"


def _other_prompt(group):
    group.group_id = group.prompt.prompt_id = "b"


def _twice(group):
    group.rollouts[1].samples[0].sample_id = group.rollouts[0].samples[0].sample_id


def _nan_reward(group):
    group.rollouts[1].reward = float("nan")


def _one_missing(group):
    del group.rollouts[1]


@pytest.mark.parametrize(
    "spoil, texts",
    [
        (_nan, ["logprobs", "finite", "position 1"]),
        (_short, ["logprobs", "4"]),
        (_no_version, ["version", "must be set"]),
        (_other_run, ["version.run_id", "'elsewhere'"]),
        (_other_prompt, ["group.group_id", "'a'"]),
        (_twice, ["sample_id", "repeated"]),
        (_nan_reward, ["reward", "finite"]),
        (_one_missing, ["group.rollouts", "must be 2"]),
    ],
)
async def test_a_bad_group_is_refused_by_name_and_the_lease_stays(client, refused, spoil, texts):
    await client.open(batch_groups=1, group_size=2)
    await client.put("a")
    lease = (await client.lease()).leases[0]
    good = b.group(lease)
    bad = b.s.Group()
    bad.CopyFrom(good)
    spoil(bad)
    if spoil in (_nan, _short, _no_version, _other_run):
        texts = [*texts, bad.rollouts[1].samples[0].sample_id]
    with refused(grpc.StatusCode.INVALID_ARGUMENT, *texts):
        await client.commit(lease, bad)
    assert (await client.stats()).groups_committed_total == 0
    assert (await client.commit(lease, good)).outcome == pb.COMMIT_OUTCOME_READY


async def test_empty_responses_and_empty_masks_are_taken_and_indexed(client):
    """A response of no tokens, and one whose mask is all zero, have defined counts."""
    await client.open(batch_groups=1, group_size=2)
    await client.put("a")
    lease = (await client.lease()).leases[0]
    group = b.group(lease)
    empty = group.rollouts[0].samples[0].segments[1]
    empty.token_ids.CopyFrom(to_tensor(np.zeros(0, np.int32)))
    empty.generation.logprobs.CopyFrom(to_tensor(np.zeros(0, np.float32)))
    group.rollouts[1].samples[0].segments[1].trainable_mask.CopyFrom(to_tensor(np.zeros(4, np.bool_)))
    assert (await client.commit(lease, group)).outcome == pb.COMMIT_OUTCOME_READY
    first, second = (one.samples[0] for one in (await client.batch()).groups[0].rollouts)
    assert (first.tokens, first.trainable_tokens) == (3, 0)
    assert (second.tokens, second.trainable_tokens) == (7, 0)


async def test_zero_reward_is_a_value(client):
    await client.open(batch_groups=1, group_size=2)
    await client.put("a")
    await client.commit((await client.lease()).leases[0], rewards=[0.0, -0.0])
    for one in (await client.batch()).groups[0].rollouts:
        assert one.HasField("reward") and one.reward == 0.0 and one.rewards["exact"] == 0.0


async def test_fan_out_and_rollouts_without_samples_count_once(client):
    await client.open(batch_groups=1, group_size=2)
    await client.put("a")
    lease = (await client.lease()).leases[0]
    group = b.group(lease)
    group.rollouts[0].samples.append(b.sample("extra"))
    del group.rollouts[1].samples[:]
    await client.commit(lease, group)
    assert [len(one.samples) for one in (await client.batch()).groups[0].rollouts] == [2, 0]


async def test_a_refused_sample_sends_its_prompt_back_and_keeps_the_rest(client, refused):
    await client.open(batch_groups=2, group_size=1)
    await client.put("a", "b", "c")
    for lease in (await client.lease()).leases:
        await client.commit(lease)
    batch = await client.batch()
    bad = batch.groups[0].rollouts[0].samples[0].sample_id
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "refused_samples", "'nobody'", batch.batch_id):
        await client.nack(batch, nobody="x")
    await client.nack(batch, **{bad: "NaN log-prob"})
    again = (await client.lease()).leases
    assert [(one.prompt.prompt_id, one.attempt) for one in again] == [("a", 2)]
    assert (await client.fetch(bad))[0].status.code == grpc.StatusCode.NOT_FOUND.value[0]
    await client.commit(again[0])
    assert ids(await client.batch()) == ["a", "b"]


async def test_a_batch_given_back_is_lent_again_as_it_was(client):
    await client.open(batch_groups=2, group_size=1)
    await client.put("a", "b")
    for lease in (await client.lease()).leases:
        await client.commit(lease)
    first = await client.batch()
    await client.nack(first)
    second = await client.batch()
    assert (second.batch_id, second.groups, second.ordinal) == (first.batch_id, first.groups, first.ordinal)
    assert second.lease_id != first.lease_id
