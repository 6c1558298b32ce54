"""A rollout that fails says where and why; the rest of its group and of the run goes on."""

from __future__ import annotations

import numpy as np
import pytest
from worker_models import LENGTH, STOP, answering, delta, until

from vime_proto.errors import ContractError
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_tensor
from vime_proto.validate import validate_group
from vime_rollout.worker import WorkerSettings


async def one_group(stage, script, prompt, group_size=2, **options):
    one = await stage(script, [prompt], **options)
    # With one attempt a group whose rollouts all fail is dropped, not asked for again.
    await one.open_run(group_size=group_size, batch_groups=1, max_attempts=1)
    kept = []
    commit = one.buffer.store.commit
    one.buffer.store.commit = lambda run, lease, group: (kept.append(group), commit(run, lease, group))[1]
    worker = one.worker()
    await until(lambda: bool(kept))
    one.stop.set()
    await worker
    (group,) = kept
    validate_group(group, group_size=group_size)
    return group


def failures(group):
    return [
        (one.failure.stage, one.failure.message) for one in group.rollouts if one.status == pb.ROLLOUT_STATUS_FAILED
    ]


async def test_a_reward_that_raises_fails_its_rollout_with_the_reason(stage):
    prompt = pb.Prompt(prompt_id="p", text="x", answer="east")
    group = await one_group(stage, answering([5, 2]), prompt, reward="numeric")
    assert failures(group) == [("reward", "the answer 'east' of prompt 'p@0' is no number")] * 2
    assert not any(one.HasField("reward") or one.samples for one in group.rollouts)


async def test_a_pooled_reward_that_raises_fails_its_rollout_with_the_reason(stage, monkeypatch, tmp_path):
    (tmp_path / "failing_reward.py").write_text("def score(item):\n    raise KeyError('level')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    prompt = pb.Prompt(prompt_id="p", text="x", answer="5")
    group = await one_group(stage, answering([5, 2]), prompt, reward="failing_reward:score")
    assert failures(group) == [("reward", "KeyError: 'level'")] * 2


async def test_an_unknown_reward_of_a_prompt_names_the_nearest(stage):
    prompt = pb.Prompt(prompt_id="p", text="x", answer="5", reward="exat")
    group = await one_group(stage, answering([5, 2]), prompt)
    assert all("did you mean 'exact'?" in message for _, message in failures(group))


async def test_a_rollout_that_fails_leaves_the_others_of_its_group(stage):
    async def script(request, seen):
        if request.request_id.split(":")[1] == "1":
            raise ContractError("prompt_token_ids", "made to fail")
        yield delta([5, 2], 0, STOP)

    group = await one_group(stage, script, pb.Prompt(prompt_id="p", text="x", answer="5"), group_size=3)
    statuses = [one.status for one in group.rollouts]
    assert statuses == [pb.ROLLOUT_STATUS_COMPLETED, pb.ROLLOUT_STATUS_FAILED, pb.ROLLOUT_STATUS_COMPLETED]
    ((stage_name, message),) = failures(group)
    assert stage_name == "generate" and "made to fail" in message


async def test_a_limit_makes_a_rollout_truncated_and_it_is_scored(stage, tokenizer):
    ids = tokenizer.encode("55").tolist()
    prompt = pb.Prompt(prompt_id="p", text="x", answer="55")
    group = await one_group(stage, answering(ids, finish=LENGTH), prompt)
    assert [one.status for one in group.rollouts] == [pb.ROLLOUT_STATUS_TRUNCATED] * 2
    assert [one.reward for one in group.rollouts] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": ""}, "has no tokens"),
        ({"messages_json": "{"}, "is not JSON"),
        ({"messages_json": "[]"}, "must be a JSON array of messages"),
        ({"messages_json": '[{"role": "user"}, {"role": "tool", "content": 3}]'}, "chat template refuses"),
        ({"token_ids": to_tensor(np.array([1, 512], np.int32))}, r"must be in \[0, 512\)"),
        ({"token_ids": to_tensor(np.array([1, -1], np.int32))}, r"must be in \[0, 512\)"),
        ({"token_ids": to_tensor(np.ones(4096, np.int32))}, "has 4096 tokens"),
        ({"text": "x", "sampling": pb.SamplingParams(temperature=0)}, "only evaluations may be greedy"),
        ({"text": "x", "sampling": pb.SamplingParams(temperature=-1)}, "above 0"),
    ],
)
async def test_a_prompt_that_cannot_be_asked_is_reported_and_not_generated(stage, fields, message):
    one = await stage(answering([5, 2]), [])
    from vime_proto.buffer.v1 import buffer_pb2
    from vime_rollout.worker import Tokenizer
    from vime_rollout.worker._errors import RolloutError
    from vime_rollout.worker._prompt import Preparer

    prepare = Preparer(Tokenizer(one.settings["tokenizer"]), pb.SamplingParams(max_new_tokens=4), 0, False, 512, 4096)
    lease = buffer_pb2.PromptLease(lease_id="l", attempt=1, prompt=pb.Prompt(prompt_id="p", **fields))
    with pytest.raises(RolloutError, match=message) as caught:
        prepare(lease)
    assert "'p'" in str(caught.value) and not caught.value.retryable and caught.value.stage == "prompt"


@pytest.mark.parametrize("temperature", [0.0, -0.5])
def test_a_temperature_that_training_cannot_use_is_refused_at_the_start(temperature):
    fields = {"run_id": "r", "buffer": "h:1", "rollout": "h:2", "tokenizer": "t"}
    with pytest.raises(ValueError, match=r"sampling\.temperature"):
        WorkerSettings(**fields, sampling={"temperature": temperature})
