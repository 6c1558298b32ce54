"""Evaluation leases: their own parameters field by field, greedy if they like, the version on every sample."""

from __future__ import annotations

import asyncio
import uuid

from worker_models import RUN, STOP, delta

from vime_proto.buffer.v1 import buffer_pb2
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_numpy
from vime_proto.version import policy_version


async def evaluate(one, name, sampling=None, rollouts=0):
    started = await one.stub.StartEvaluation(
        buffer_pb2.StartEvaluationRequest(
            request_id=uuid.uuid4().hex, run_id=RUN, set=name, version=policy_version(RUN, 0, 0), sampling=sampling,
            rollouts_per_prompt=rollouts,
        )
    )  # fmt: skip
    return await one.stub.GetEvaluationResult(
        buffer_pb2.GetEvaluationResultRequest(run_id=RUN, evaluation_id=started.evaluation_id, wait_seconds=10.0)
    )


async def test_each_set_has_its_own_parameters_and_training_keeps_the_worker_s(stage, prompts, tokenizer):
    async def script(request, seen):
        (text,) = tokenizer.decode([to_numpy(request.prompt_token_ids)])
        yield delta([*tokenizer.encode(str(int(text.split("+")[0]) + 1)), 2], 0, STOP)

    rows = [pb.Prompt(prompt_id=f"e{n}", text=f"<bos>{n}+1=", answer=str(n + 1)) for n in range(3)]
    worker = {"max_new_tokens": 16, "temperature": 0.7, "stop": ["\n"], "top_k": 5}
    one = await stage(
        script, prompts, evaluations={"short": rows, "long": rows}, sampling=worker, seeded_requests=False
    )
    await one.open_run()
    one.worker()
    greedy = pb.SamplingParams(temperature=0.0, max_new_tokens=3, stop=["a", "b"])
    result = await evaluate(one, "short", greedy, rollouts=2)
    assert result.done and result.mean_reward == 1.0 and result.completed_prompts == 3 and result.k == 2
    assert [version.number for version in result.versions] == [0]
    asked = [r.sampling for r in one.engine.requests if r.sampling.temperature == 0.0]
    assert len(asked) == 6
    for sampling in asked:
        assert sampling.max_new_tokens == 3 and list(sampling.stop) == ["a", "b"] and sampling.top_k == 5
    await evaluate(one, "long", pb.SamplingParams(max_new_tokens=64))
    asked = [r.sampling for r in one.engine.requests if r.sampling.max_new_tokens == 64]
    assert len(asked) == 3
    assert all(s.temperature == 0.7 and list(s.stop) == ["\n"] for s in asked)
    await one.batch()
    training = [r.sampling for r in one.engine.requests if r.sampling.max_new_tokens == 16]
    assert training and all(s.temperature == 0.7 for s in training)
    # Without seeds of its own training leaves them to the engine; results of evaluations stay comparable.
    assert not any(s.HasField("seed") for s in training)
    evaluated = [r.sampling for r in one.engine.requests if r.sampling.max_new_tokens != 16]
    assert len(evaluated) == 9 and len({s.seed for s in evaluated if s.HasField("seed")}) == 9


async def test_a_failed_rollout_is_counted_not_left_out(stage):
    async def script(request, seen):
        if request.request_id.split(":")[1] == "1":
            yield delta([5], 0, STOP, logprobs=[float("nan")])
        else:
            yield delta([5, 2], 0, STOP)

    rows = [pb.Prompt(prompt_id="e", text="x", answer='"')]
    one = await stage(script, [pb.Prompt(prompt_id="p", text="x", answer="5")], evaluations={"set": rows})
    await one.open_run(batch_groups=4)
    one.worker()
    result = await evaluate(one, "set", rollouts=3)
    assert result.k == 3 and result.rollouts == 3 and result.failed_rollouts == 1 and result.scored_rollouts == 2


async def test_five_items_give_exactly_five_results(stage):
    asked = []

    async def script(request, seen):
        asked.append(request.request_id)
        await asyncio.sleep(0)
        yield delta([5, 2], 0, STOP)

    rows = [pb.Prompt(prompt_id=f"e{n}", text="x", answer="5") for n in range(5)]
    one = await stage(script, [pb.Prompt(prompt_id="p", text="y", answer="5")], evaluations={"set": rows})
    await one.open_run(batch_groups=4)
    one.worker(max_groups_in_flight=4)
    result = await evaluate(one, "set", rollouts=1)
    assert (result.prompts, result.completed_prompts, result.scored_rollouts) == (5, 5, 5)
