"""Evaluations."""

import asyncio

import builders as b
import grpc
import pytest
from client import prompts_of
from pydantic import ValidationError

from vime_buffer import BufferSettings, EvaluationSet
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.version import policy_version


@pytest.fixture
def evaluated(start, jsonl):
    path = jsonl("held.jsonl", [{"prompt": f"q{i}", "answer": i} for i in range(5)])
    sets = {
        "held": EvaluationSet(
            path=path, answer_field="answer", sampling={"temperature": 0, "stop": ["\n"], "max_new_tokens": 8}
        ),
        "many": EvaluationSet(path=path, rollouts_per_prompt=4, sampling={"temperature": 0.7, "max_new_tokens": 32}),
    }
    return start(evaluation=sets)


async def _start(client, name="held", **fields):
    return await client.stub.StartEvaluation(
        pb.StartEvaluationRequest(
            request_id=b.rid(), run_id=b.RUN, set=name, version=policy_version(b.RUN, 0, 0), **fields
        )
    )


async def _result(client, started, wait=0.0):
    return await client.stub.GetEvaluationResult(
        pb.GetEvaluationResultRequest(run_id=b.RUN, evaluation_id=started.evaluation_id, wait_seconds=wait)
    )


async def test_evaluation_goes_first_and_outside_the_gate(evaluated):
    async with evaluated as client:
        await client.open(batch_groups=1, group_size=2)
        await client.put("a")
        held = (await client.lease()).leases
        started = await _start(client)
        assert started.prompts == 5
        leases = (await client.lease()).leases
        assert [one.purpose for one in leases] == [pb.LEASE_PURPOSE_EVALUATE] * 5
        assert {one.evaluation_id for one in leases} == {started.evaluation_id}
        assert [one.prompt.text for one in leases] == [f"q{i}" for i in range(5)]
        assert {one.group_size for one in leases} == {1} and leases[0].sampling.temperature == 0.0
        stats = await client.stats()
        assert (stats.prompts_leased, stats.evaluations_open) == (1, 1)
        waiting = asyncio.create_task(_result(client, started, 20))
        for i, lease in enumerate(leases):
            answer = await client.commit(lease, rewards=[float(i < 2)], temperature=0.0)
            assert answer.outcome == pb.COMMIT_OUTCOME_EVALUATED
        result = await asyncio.wait_for(waiting, 30)
        assert (result.done, result.prompts, result.completed_prompts, result.rollouts, result.k) == (True, 5, 5, 5, 1)
        assert result.mean_reward == pytest.approx(0.4) and result.pass_at_k == pytest.approx(0.4)
        assert result.mean_rewards["exact"] == pytest.approx(0.4)
        assert result.mean_response_tokens == 4 and result.truncated_share == 0.0
        assert [one.number for one in result.versions] == [0]
        assert await client.renew(*held) == [pb.LEASE_DIRECTIVE_CONTINUE]
        assert (await client.batch()).outcome == pb.LEASE_OUTCOME_EMPTY
        assert (await client.stats()).evaluations_open == 0


async def test_failed_rollouts_count_as_zero_and_k_is_the_number_asked_for(evaluated):
    async with evaluated as client:
        await client.open()
        started = await _start(client, "many", rollouts_per_prompt=3, max_prompts=1)
        (lease,) = (await client.lease()).leases
        assert lease.group_size == 3
        await client.commit(lease, rewards=[0.9, 1.0, 0.5], failed=1)
        result = await _result(client, started)
        assert (result.k, result.scored_rollouts, result.failed_rollouts, result.rollouts) == (3, 2, 1, 3)
        assert result.mean_reward == pytest.approx(1.5 / 3) and result.pass_at_k == 1.0
        assert result.mean_rewards["exact"] == pytest.approx(1.5 / 3)
        assert result.mean_response_tokens == 4


async def test_sets_keep_their_own_sampling_and_requests_lie_over_it(evaluated):
    async with evaluated as client:
        await client.open()
        await _start(client, max_prompts=1)
        await _start(client, "many", max_prompts=1, sampling=b.s.SamplingParams(temperature=0.2))
        await _start(client, max_prompts=1, sampling=b.s.SamplingParams(stop=["END"]))
        held, many, other = (await client.lease()).leases
        assert (held.sampling.temperature, list(held.sampling.stop), held.sampling.max_new_tokens) == (0.0, ["\n"], 8)
        assert (many.sampling.temperature, list(many.sampling.stop), many.sampling.max_new_tokens) == (0.2, [], 32)
        assert many.group_size == 4
        assert (other.sampling.temperature, list(other.sampling.stop), other.sampling.max_new_tokens) == (
            0.0,
            ["END"],
            8,
        )


async def test_the_deadline_gives_the_coverage_reached(evaluated, clock, refused):
    async with evaluated as client:
        await client.open()
        started = await _start(client, deadline_seconds=30)
        leases = (await client.lease()).leases
        for lease in leases[:2]:
            await client.commit(lease, rewards=[1.0])
        assert not (await _result(client, started)).done
        clock.now += 31
        client.server.core.due.set()
        result = await _result(client, started, 10)
        assert (result.done, result.completed_prompts, result.mean_reward) == (True, 2, 1.0)
        assert await client.renew(leases[2]) == [pb.LEASE_DIRECTIVE_ABORT]
        with refused(grpc.StatusCode.ABORTED, leases[2].lease_id, "evaluation is over"):
            await client.commit(leases[2])
        assert (await client.lease()).outcome == pb.LEASE_OUTCOME_EMPTY


async def test_a_question_that_always_fails_ends_the_evaluation(evaluated):
    async with evaluated as client:
        await client.open(max_attempts=2)
        started = await _start(client, "many", max_prompts=1)
        for _ in range(2):
            await client.release((await client.lease()).leases[0], failed=True)
        result = await _result(client, started)
        assert (result.done, result.completed_prompts, result.failed_rollouts) == (True, 0, 4)
        assert result.mean_reward == 0.0 and not result.HasField("pass_at_k")


async def test_fan_out_and_truncation_in_an_evaluation(evaluated):
    async with evaluated as client:
        await client.open()
        started = await _start(client, max_prompts=1)
        (lease,) = (await client.lease()).leases
        group = b.group(lease, rewards=[1.0], temperature=0.0)
        group.rollouts[0].samples.append(b.sample("second", temperature=0.0))
        group.rollouts[0].status = b.s.ROLLOUT_STATUS_TRUNCATED
        await client.commit(lease, group)
        result = await _result(client, started)
        assert (result.scored_rollouts, result.mean_response_tokens, result.truncated_share) == (1, 8.0, 1.0)


async def test_an_evaluation_at_the_end_of_the_data_is_answered(evaluated):
    """The last evaluation starts after the last batch: workers must still be there."""
    async with evaluated as client:
        await client.open(batch_groups=1, group_size=1, epochs=1)
        await client.put("a")
        await client.step(1)
        assert (await client.batch()).outcome == pb.LEASE_OUTCOME_END_OF_DATA
        waiting = asyncio.create_task(client.lease(wait=20))
        await _start(client)
        assert len((await asyncio.wait_for(waiting, 30)).leases) == 5


async def test_workers_stay_until_the_run_is_closed_however_long_the_last_checkpoint_takes(evaluated):
    async with evaluated as client:
        await client.open(batch_groups=1, group_size=1, epochs=1)
        await client.put("a")
        await client.step(1)
        for _ in range(4):
            assert (await client.lease(wait=0.1)).outcome == pb.LEASE_OUTCOME_EMPTY, "an evaluation may still come"
            assert (await client.lease()).outcome == pb.LEASE_OUTCOME_EMPTY, "also for one that does not wait"
        started = await _start(client, max_prompts=1)
        await client.commit((await client.lease(wait=0.1)).leases[0], temperature=0.0)
        assert (await _result(client, started)).done
        assert (await client.lease(wait=0.1)).outcome == pb.LEASE_OUTCOME_EMPTY
        waiting = asyncio.create_task(client.lease(wait=20))
        await client.close_run()
        assert (await asyncio.wait_for(waiting, 30)).outcome == pb.LEASE_OUTCOME_END_OF_DATA


async def test_several_versions_in_one_evaluation_are_told(evaluated):
    async with evaluated as client:
        await client.open()
        started = await _start(client, max_prompts=2)
        first, second = (await client.lease()).leases
        await client.commit(first, versions=((0, 0),))
        await client.commit(second, versions=((0, 1),))
        assert [one.number for one in (await _result(client, started)).versions] == [0, 1]


async def test_unknown_sets_and_parameters_are_named(evaluated, refused, jsonl):
    async with evaluated as client:
        await client.open()
        with refused(grpc.StatusCode.NOT_FOUND, "'hold'", "did you mean 'held'", "many"):
            await _start(client, "hold")
        with refused(grpc.StatusCode.NOT_FOUND, "'nothing'"):
            await client.stub.GetEvaluationResult(pb.GetEvaluationResultRequest(run_id=b.RUN, evaluation_id="nothing"))
    with pytest.raises(ValidationError, match="did you mean 'temperature'"):
        BufferSettings(evaluation={"x": {"path": "x", "sampling": {"temprature": 1}}})
    with pytest.raises(ValidationError, match="temperature"):
        BufferSettings(evaluation={"x": {"path": "x", "sampling": {"temperature": -1}}})


async def test_a_restore_ends_evaluations_with_the_coverage_reached(evaluated, refused):
    """Engines will not serve the old lineage again: its questions must not stand before the training of the new one."""
    async with evaluated as client:
        await client.open(batch_groups=1, group_size=1)
        await client.put("a")
        started = await _start(client)
        leases = (await client.lease(most=5)).leases
        await client.commit(leases[0])
        await client.rewind(0)
        result = await _result(client, started)
        assert (result.done, result.completed_prompts, result.prompts) == (True, 1, 5)
        with refused(grpc.StatusCode.ABORTED, leases[1].lease_id, "new lineage"):
            await client.commit(leases[1])
        await client.publish(0, 1)
        assert prompts_of(await client.lease()) == ["a"]
        with refused(grpc.StatusCode.ABORTED, "run/0:0 is not of the present lineage 1"):
            await _start(client)
