"""User hooks and built-in filters."""

import pytest
from client import ids, prompts_of
from pydantic import ValidationError

from vime_buffer import BufferSettings
from vime_buffer.settings import PromptFile
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.errors import ContractError


async def _commit_one(client, rewards, **options):
    await client.open(batch_groups=1, group_size=8, **options)
    await client.put("a", "b")
    lease = (await client.lease()).leases[0]
    return await client.commit(lease, rewards=rewards)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.0, 1.0])
async def test_equal_rewards_have_no_deviation(start, value):
    async with start(group_filter="nonzero_std") as client:
        answer = await _commit_one(client, [value] * 8)
        assert (answer.outcome, answer.reason) == (pb.COMMIT_OUTCOME_FILTERED, "zero_std")
        stats = await client.stats()
        assert dict(stats.groups_filtered_total) == {"zero_std": 1} and stats.capacity == 1
        assert prompts_of(await client.lease()) == ["b"]


async def test_one_loser_of_eight_keeps_the_whole_group(start):
    async with start(group_filter="nonzero_std") as client:
        assert (await _commit_one(client, [0.0] + [0.95] * 7)).outcome == pb.COMMIT_OUTCOME_READY
        assert len((await client.batch()).groups[0].rollouts) == 8


async def test_a_filter_by_import_path(start):
    async with start(group_filter="sample_hooks:keep_best") as client:
        answer = await _commit_one(client, [0.0])
        assert (answer.outcome, answer.reason) == (pb.COMMIT_OUTCOME_FILTERED, "nobody_solved_it")


@pytest.mark.parametrize(
    "name, texts",
    [
        ("broken", ["RuntimeError: division by zero"]),
        ("no_decision", ["answered True"]),
        ("no_reason", ["FilterDecision(False, reason)"]),
    ],
)
async def test_a_filter_that_fails_names_the_group_and_loses_nothing(start, name, texts):
    async with start(group_filter=f"sample_hooks:{name}") as client:
        answer = await _commit_one(client, [0.0, 1.0], max_attempts=2)
        assert answer.outcome == pb.COMMIT_OUTCOME_RETRY
        for text in [*texts, "'a'", f"sample_hooks:{name}"]:
            assert text in answer.reason
        lease = (await client.lease()).leases[0]
        assert (lease.prompt.prompt_id, lease.attempt) == ("a", 2)
        assert (await client.commit(lease)).outcome == pb.COMMIT_OUTCOME_DROPPED
        assert (await client.stats()).prompts_dropped_total == 1


@pytest.mark.parametrize(
    "name, texts",
    [
        ("nonzero_stdd", ["did you mean 'nonzero_std'", "none"]),
        ("sample_hooks:keep_bets", ["did you mean 'keep_best'"]),
        ("no_such_module:f", ["cannot import 'no_such_module'"]),
        ("sample_hooks:calls", ["not callable"]),
    ],
)
def test_unknown_filters_are_refused_with_the_nearest_name(name, texts):
    with pytest.raises(ValidationError) as caught:
        BufferSettings(group_filter=name)
    for text in texts:
        assert text in str(caught.value)


def _sums(jsonl, count=3):
    return [PromptFile(path=jsonl("sums.jsonl", [{"a": i, "b": 1} for i in range(count)]))]


@pytest.mark.parametrize(
    "name, kind, value",
    [("as_text", "text", "0+1="), ("as_messages", "messages_json", '[{"role": "user", "content": "0 plus 1"}]')],
)
async def test_a_message_format_makes_the_input(start, jsonl, name, kind, value):
    async with start(prompts=_sums(jsonl), message_format=f"sample_hooks:{name}") as client:
        await client.open(batch_groups=1, group_size=1)
        prompt = (await client.lease()).leases[0].prompt
        assert prompt.WhichOneof("input") == kind and getattr(prompt, kind) == value


async def test_a_format_that_raises_names_the_row_and_drops_it_after_its_attempts(start, jsonl, caplog):
    async with start(prompts=_sums(jsonl, 9), message_format="sample_hooks:no_sevens") as client:
        await client.open(batch_groups=9, group_size=1, epochs=1, max_attempts=2)
        asked = prompts_of(await client.lease())
        assert asked == [f"sums-0-{i}" for i in range(9) if i != 7]
        assert (await client.lease()).outcome == pb.LEASE_OUTCOME_EMPTY
        assert (await client.stats()).prompts_dropped_total == 1
    assert "sums.jsonl:8" in caplog.text and "sevens are unlucky" in caplog.text


async def test_a_format_that_works_the_second_time_loses_nothing(start, jsonl):
    import sample_hooks

    sample_hooks.calls["format"] = 0
    async with start(prompts=_sums(jsonl), message_format="sample_hooks:second_time") as client:
        await client.open(batch_groups=3, group_size=1, epochs=1)
        asked = prompts_of(await client.lease())
        assert asked == ["sums-0-0", "sums-0-2"]
        assert prompts_of(await client.lease()) == ["sums-0-1"]
        assert (await client.stats()).prompts_dropped_total == 0


async def test_a_format_that_answers_something_else_is_named(start, jsonl, caplog):
    async with start(prompts=_sums(jsonl), message_format="sample_hooks:wrong_type") as client:
        await client.open(batch_groups=3, group_size=1, epochs=1, max_attempts=1)
        assert prompts_of(await client.lease()) == ["sums-0-0"]
    assert "answered a int" in caplog.text and "sums.jsonl:2" in caplog.text


def test_a_format_that_fails_on_the_first_row_is_seen_at_the_start(jsonl):
    settings = BufferSettings(
        prompts=[PromptFile(path=jsonl("x.jsonl", [{"a": 7, "b": 1}]))], message_format="sample_hooks:no_sevens"
    )
    with pytest.raises(Exception, match=r"no_sevens.*unlucky.*x\.jsonl:1"):
        settings.open_source()


def test_unknown_formats_are_refused(jsonl):
    with pytest.raises(ContractError, match="did you mean 'as_text'"):
        BufferSettings(prompts=_sums(jsonl), message_format="sample_hooks:as_txt").open_source()


async def test_filtered_groups_free_their_place_until_a_batch_is_full(start):
    async with start(group_filter="nonzero_std") as client:
        await client.open(batch_groups=2, group_size=2)
        await client.put(*"abcdef")
        while (await client.batch()).outcome == pb.LEASE_OUTCOME_EMPTY:
            for lease in (await client.lease(most=1)).leases:
                name = lease.prompt.prompt_id
                await client.commit(lease, rewards=[0.0, 1.0] if name in "ce" else [1.0, 1.0])
        batch = await client.batch(incarnation="2")
        assert ids(batch) == ["c", "e"]
        assert (await client.stats()).groups_filtered_total["zero_std"] == 3
