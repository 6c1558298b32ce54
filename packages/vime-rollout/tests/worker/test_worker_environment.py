"""Rollouts of several turns."""

from __future__ import annotations

import json

import environments
import pytest
import worker_models as models
from test_worker_failures import failures, one_group
from worker_models import ABORT, LENGTH, STOP, delta, ids_of

from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_numpy

CHAT = pb.Prompt(prompt_id="p", messages_json=json.dumps([{"role": "user", "content": "2+2?"}]), answer="4")


def saying(tokenizer, *turns, finish=STOP):
    """Each model turn says the next text and the end token."""

    async def script(request, seen):
        turn = int(request.request_id.split(":")[2].split(".")[0])
        ids = tokenizer.encode(turns[turn] + ("<|im_end|>" if finish == STOP else "")).tolist()
        yield delta(ids, 0, finish)

    return script


def sample_ids(sample):
    return [one for segment in sample.segments for one in ids_of(segment.token_ids)]


def roles(sample):
    return [pb.SegmentRole.Name(one.role).removeprefix("SEGMENT_ROLE_") for one in sample.segments]


async def test_turns_and_tools_make_one_sample_equal_to_one_rendering(stage, tokenizer):
    environments.Echo.made.clear()
    group = await one_group(stage, saying(tokenizer, "hello", "tool"), CHAT, environment="environments:Echo")
    for rollout in group.rollouts:
        assert rollout.status == pb.ROLLOUT_STATUS_COMPLETED and rollout.reward == 2.0
        assert rollout.rewards == {"environment": 2.0, "format": 1.0} and rollout.metrics == {"turns": 2.0}
        (sample,) = rollout.samples
        assert roles(sample) == ["PROMPT", "MODEL", "TEMPLATE", "TOOL", "TEMPLATE", "TOOL", "TEMPLATE", "MODEL"]
        assert [one.trainable_all for one in sample.segments] == [role == "MODEL" for role in roles(sample)]
        assert sample.segments[1].reward == 0.25 and not sample.segments[-1].HasField("reward")
        messages = [
            *json.loads(CHAT.messages_json),
            {"role": "assistant", "content": "hello"},
            {"role": "tool", "content": "hello"},
            {"role": "tool", "content": "tool"},
        ]
        assert sample_ids(sample) == tokenizer.encode(tokenizer.render(messages) + "tool<|im_end|>").tolist()
    assert len(environments.Echo.made) == 2 and all(one.closed for one in environments.Echo.made)
    seeds = [one.task.seed for one in environments.Echo.made]
    assert len(set(seeds)) == 2 and [one.task.rollout for one in environments.Echo.made] == [0, 1]


async def test_the_second_turn_is_asked_with_exactly_what_was_sampled(stage, tokenizer):
    letters = [one for letter in "hello" for one in tokenizer.encode(letter).tolist()]
    end = tokenizer.encode("<|im_end|>").tolist()

    async def script(request, seen):
        yield delta([*letters, *end], 0, STOP)

    one = {}

    async def recording(request, seen):
        one.setdefault(request.request_id, ids_of(request.prompt_token_ids))
        async for message in script(request, seen):
            yield message

    group = await one_group(stage, recording, CHAT, group_size=1, environment="environments:Echo")
    (sample,) = group.rollouts[0].samples
    first, second = (ids for _, ids in sorted(one.items()))
    assert second[: len(first) + len(letters) + 1] == [*first, *letters, *end]
    assert sample_ids(sample)[: len(second)] == second
    assert ids_of(sample.segments[1].token_ids) == [*letters, *end]


async def test_a_turn_cut_by_a_limit_ends_the_rollout_and_keeps_its_status(stage, tokenizer):
    async def script(request, seen):
        turn = int(request.request_id.split(":")[2].split(".")[0])
        yield delta(tokenizer.encode(f"hello{turn}").tolist(), 0, LENGTH if turn == 1 else STOP)

    environments.Echo.made.clear()
    group = await one_group(
        stage, script, CHAT, group_size=1, environment="environments:Echo", environment_options={"turns": 3}
    )
    (rollout,) = group.rollouts
    assert rollout.status == pb.ROLLOUT_STATUS_TRUNCATED
    assert [one.truncated for one in environments.Echo.made[0].responses] == [False, True]
    assert roles(rollout.samples[0])[-1] == "MODEL" and roles(rollout.samples[0]).count("MODEL") == 2


async def test_a_weight_update_in_the_middle_of_a_turn_continues_it(stage, tokenizer):
    async def script(request, seen):
        _, _, tail = request.request_id.split(":")
        if tail == "1.0":
            yield delta(tokenizer.encode("to").tolist(), 0, ABORT)
        else:
            yield delta(tokenizer.encode("ol<|im_end|>").tolist(), int(tail == "1.1"), STOP)

    group = await one_group(stage, script, CHAT, group_size=1, environment="environments:Echo")
    (sample,) = group.rollouts[0].samples
    assert roles(sample)[-2:] == ["MODEL", "MODEL"]
    assert [one.generation.version.number for one in sample.segments[-2:]] == [0, 1]
    # What was sampled stays as sampled, although its text has one token: "tool".
    assert ids_of(sample.segments[-2].token_ids) == tokenizer.encode("to").tolist()


async def test_an_environment_may_declare_its_result_unreliable(stage, tokenizer):
    group = await one_group(
        stage,
        saying(tokenizer, "a"),
        CHAT,
        environment="environments:Echo",
        environment_options={"turns": 1, "reliable": False},
    )
    assert all(one.HasField("reliable") and not one.reliable and one.reward == 1.0 for one in group.rollouts)


async def test_text_prompts_take_text_as_it_stands_and_the_reward_scores_the_last_turn(stage, tokenizer):
    script = saying(tokenizer, "<search>x</search>", "4")
    prompt = pb.Prompt(prompt_id="p", text="2+2?", answer="4")
    group = await one_group(stage, script, prompt, environment="environments:Searching")
    for rollout in group.rollouts:
        assert rollout.reward == 1.0 and rollout.rewards == {"exact": 1.0}
        assert roles(rollout.samples[0]) == ["PROMPT", "MODEL", "TOOL", "MODEL"]
        assert tokenizer.decode([to_numpy(rollout.samples[0].segments[2].token_ids)]) == ["<result>4</result>"]


async def test_a_template_that_forgets_makes_two_samples_and_trains_each_turn_once(stage, tmp_path, tokenizer):
    folder = models.write_tokenizer(tmp_path, models.FORGETFUL_TEMPLATE)
    group = await one_group(
        stage,
        saying(tokenizer, "<think>hm</think>4", "5"),
        CHAT,
        environment="environments:Echo",
        tokenizer=str(folder),
    )
    for rollout in group.rollouts:
        first, second = rollout.samples
        assert roles(first) == roles(second) == ["PROMPT", "MODEL"]
        trained = [tokenizer.decode([to_numpy(one.segments[1].token_ids)])[0] for one in (first, second)]
        assert trained == ["<think>hm</think>4", "5"]
        assert "assistant\n4" in tokenizer.decode([to_numpy(second.segments[0].token_ids)])[0]


@pytest.mark.parametrize(
    ("where", "message"), [("reset", "no sandbox"), ("step", "no sandbox"), ("", "neither messages")]
)
async def test_an_environment_that_fails_fails_its_rollout(stage, tokenizer, where, message):
    group = await one_group(
        stage, saying(tokenizer, "a"), CHAT, environment="environments:Failing", environment_options={"where": where}
    )
    found = failures(group)
    assert [name for name, _ in found] == ["environment"] * 2 and all(message in text for _, text in found)


async def test_turns_are_limited(stage, tokenizer):
    group = await one_group(stage, saying(tokenizer, *"abcdef"), CHAT, environment="environments:Endless", max_turns=3)
    for rollout in group.rollouts:
        assert rollout.status == pb.ROLLOUT_STATUS_TRUNCATED
        assert roles(rollout.samples[0]).count("MODEL") == 3


async def test_a_stop_string_inside_a_token_ends_the_turn_where_the_engine_says(stage, tokenizer):
    ids = tokenizer.encode("<search>x</search>").tolist()

    async def script(request, seen):
        turn = request.request_id.split(":")[2]
        assert list(request.sampling.stop) == ["</search>"]
        if turn == "0.0":
            yield delta(ids, 0, STOP, stop_string="</search>", stop_included=True)
        else:
            yield delta([5, 2], 0, STOP)

    prompt = pb.Prompt(prompt_id="p", text="2+2?", answer="4", sampling=pb.SamplingParams(stop=["</search>"]))
    group = await one_group(stage, script, prompt, group_size=1, environment="environments:Searching")
    segment = group.rollouts[0].samples[0].segments[1]
    assert ids_of(segment.token_ids) == ids and segment.generation.stop_included
    assert len(ids_of(segment.generation.logprobs)) == len(ids)
