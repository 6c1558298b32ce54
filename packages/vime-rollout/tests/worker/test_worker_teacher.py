"""Distillation: the teacher's log-probs of what was sampled."""

from __future__ import annotations

import contextlib

import grpc
import numpy as np
import pytest
from worker_models import STOP, answering, delta, until

from vime_proto.errors import StatusError
from vime_proto.fakes import FakeEngine, serve
from vime_proto.rollout.v1 import rollout_pb2
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_numpy, to_tensor
from vime_proto.validate import validate_group
from vime_rollout.worker import WorkerSettings
from vime_rollout.worker._errors import FatalError

VOCAB = {"vocab_size": 32}
PROMPT = pb.Prompt(prompt_id="p", token_ids=to_tensor(np.array([3, 4, 5], np.int32)), answer="x")
PARSED = {"run_id": "r", "buffer": "h:1", "rollout": "h:2", "tokenizer": "t"}


@contextlib.asynccontextmanager
async def teacher(change=lambda answer: answer):
    """A fake engine with weights of its own, and the requests that it was sent; ``change`` gets each answer before it is sent."""
    engine = FakeEngine("teacher")
    engine.model.tensors["lm_head.weight"] *= 0.5
    asked = []
    score = engine.Score

    async def watched(request, context):
        asked.append(request)
        return change(await score(request, context))

    engine.Score = watched
    async with serve(engine) as server:
        yield engine, server.address, asked


async def one_group(stage, script, address, **settings):
    one = await stage(script, [PROMPT], info=VOCAB, teacher=address, teacher_temperature=0.7, **settings)
    await one.open_run(group_size=2, batch_groups=1, max_attempts=1)
    kept = []
    commit = one.buffer.store.commit
    one.buffer.store.commit = lambda run, lease, group: (kept.append(group), commit(run, lease, group))[1]
    worker = one.worker()
    await until(lambda: bool(kept) or worker.done())
    one.stop.set()
    await worker
    (group,) = kept
    validate_group(group, group_size=2)
    return group


async def test_every_sampled_token_gets_the_teachers_logprob_at_the_stated_temperature(stage):
    async def script(request, seen):
        # Two weight versions within one answer: two segments.
        yield delta([7, 8], 0)
        yield delta([9, 2], 1, STOP)

    async with teacher() as (engine, address, asked):
        group = await one_group(stage, script, address)
        assert [request.temperature for request in asked] == [0.7, 0.7]
        assert all(request.HasField("start") and request.start == 3 for request in asked)
        tokens = np.array([3, 4, 5, 7, 8, 9, 2])
        logits = engine.model.logits(tokens) / 0.7
        expected = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(2, 6), tokens[3:]]
        for rollout in group.rollouts:
            first, second = rollout.samples[0].segments[1:]
            found = [to_numpy(one.generation.teacher_logprobs) for one in (first, second)]
            assert [len(one) for one in found] == [2, 2]
            np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-6)
            assert not rollout.samples[0].segments[0].HasField("generation")


@pytest.mark.parametrize(
    ("values", "reason"), [([0.0, 0.0], "logprobs"), ([0.0, -np.inf, 0.0, 0.0], "token 4 is -inf"), (None, "logprobs.dtype")]
)
async def test_a_wrong_answer_of_the_teacher_fails_the_rollout_with_the_reason(stage, values, reason):
    def wrong(answer):
        answer.ClearField("logprobs")
        if values is not None:
            answer.logprobs.CopyFrom(to_tensor(np.array(values, np.float32)))
        return answer

    async with teacher(wrong) as (_, address, _):
        group = await one_group(stage, answering([7, 8, 9, 2]), address)
    assert [one.status for one in group.rollouts] == [pb.ROLLOUT_STATUS_FAILED] * 2
    assert all(one.failure.stage == "teacher" and reason in one.failure.message for one in group.rollouts)
    assert not any(one.samples for one in group.rollouts)


async def test_a_teacher_that_is_gone_fails_rollouts_after_the_stated_time(stage):
    def gone(answer):
        raise StatusError(grpc.StatusCode.UNAVAILABLE, "asleep")

    async with teacher(gone) as (_, address, asked):
        group = await one_group(stage, answering([7, 2]), address, teacher_retry_seconds=0.3)
    assert len(asked) > 2, "tried again while there is time"
    failures = [one.failure for one in group.rollouts]
    assert all(one.stage == "teacher" and "UNAVAILABLE: asleep" in one.message and one.retryable for one in failures)


async def test_evaluations_are_not_scored(stage):
    async with teacher() as (_, address, asked):
        question = pb.Prompt(prompt_id="q", token_ids=PROMPT.token_ids, answer="x")
        one = await stage(
            answering([7, 2]), [PROMPT], info=VOCAB, evaluations={"held": [question]}, teacher=address, teacher_temperature=1.0
        )
        await one.open_run(group_size=2, batch_groups=1)
        from vime_proto.buffer.v1 import buffer_pb2
        from vime_proto.version import policy_version

        start = buffer_pb2.StartEvaluationRequest(
            request_id="e", run_id="run", set="held", version=policy_version("run", 0, 0), rollouts_per_prompt=1
        )
        await one.stub.StartEvaluation(start)
        worker = one.worker()
        await one.batch()
        await until(lambda: any(row.evaluation_id and row.group for row in one.buffer.store.runs["run"].prompts.values()))
        one.stop.set()
        await worker
    assert len(asked) == 2


async def test_another_vocabulary_is_refused_at_the_start(stage):
    async with teacher() as (_, address, _):
        one = await stage(answering([7, 2]), [PROMPT], info={"vocab_size": 512}, teacher=address, teacher_temperature=1.0)
        with pytest.raises(FatalError, match="teacher: toy has a vocabulary of 32, the policy one of 512"):
            await one.worker()


def test_the_temperature_must_be_stated():
    with pytest.raises(ValueError, match="teacher_temperature: must be stated"):
        WorkerSettings(**PARSED, teacher="h:3")
    with pytest.raises(ValueError, match="teacher_temperature"):
        WorkerSettings(**PARSED, teacher="h:3", teacher_temperature=0.0)
    with pytest.raises(ValueError, match="teacher: missing"):
        WorkerSettings(**PARSED, teacher_temperature=1.0)
    assert rollout_pb2.ScoreRequest.DESCRIPTOR.fields_by_name["temperature"].has_presence
