"""Evaluations: first in line, outside the gate, with coverage."""

from __future__ import annotations

import grpc
import pytest

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.conformance._calls import INVALID, NOT_FOUND, new_id, refused
from vime_proto.fakes import build
from vime_proto.sample.v1 import sample_pb2


def _start(buffer, request, **fields) -> pb.StartEvaluationResponse:
    name = request.config.getoption("--evaluation-set")
    settings = {"set": name, "version": buffer.version(0), "max_prompts": 2, "rollouts_per_prompt": 1}
    try:
        return buffer.call("StartEvaluation", pb.StartEvaluationRequest, **{**settings, **fields})
    except grpc.RpcError as error:
        if error.code() is NOT_FOUND:
            pytest.skip(f"the target has no evaluation set {name!r} (--evaluation-set): {error.details()}")
        raise


def _result(buffer, evaluation_id: str, **fields) -> pb.GetEvaluationResultResponse:
    return buffer.call("GetEvaluationResult", pb.GetEvaluationResultRequest, evaluation_id=evaluation_id, **fields)


def test_an_unknown_set_is_named(buffer):
    buffer.ready("a")
    with refused(NOT_FOUND, names="no-such-set"):
        buffer.call("StartEvaluation", pb.StartEvaluationRequest, set="no-such-set", version=buffer.version(0))


def test_evaluation_prompts_come_first_and_pass_the_gate(buffer, request):
    buffer.ready("a", "b", batch_groups=1)
    held = buffer.lease_one()
    assert buffer.lease().outcome == pb.LEASE_OUTCOME_EMPTY
    started = _start(buffer, request)
    buffer.release(held)
    leases = buffer.lease(100).leases
    purposes = [lease.purpose for lease in leases]
    assert purposes[: started.prompts] == [pb.LEASE_PURPOSE_EVALUATE] * started.prompts
    assert purposes[started.prompts :] == [pb.LEASE_PURPOSE_TRAIN]
    assert {lease.evaluation_id for lease in leases[: started.prompts]} == {started.evaluation_id}


def test_the_result_counts_failures_as_zero_and_states_coverage(buffer, request):
    buffer.ready("a")
    started = _start(buffer, request, rollouts_per_prompt=2)
    assert not _result(buffer, started.evaluation_id).HasField("mean_reward"), "nothing measured is absent, not 0"
    leases = [lease for lease in buffer.lease(100).leases if lease.evaluation_id]
    assert all(lease.group_size == 2 for lease in leases)
    first = build.group(leases[0], buffer.version(0), [1.0, 0.0])
    assert buffer.commit(leases[0], first).outcome == pb.COMMIT_OUTCOME_EVALUATED
    open_result = _result(buffer, started.evaluation_id)
    assert not open_result.done and open_result.completed_prompts == 1
    for lease in leases[1:]:
        group = build.group(lease, buffer.version(0), [0.0, 0.0])
        group.rollouts[1].CopyFrom(build.failed_group(lease).rollouts[1])
        buffer.commit(lease, group)
    result = _result(buffer, started.evaluation_id, wait_seconds=5)
    assert result.done
    assert (result.prompts, result.completed_prompts, result.k) == (len(leases), len(leases), 2)
    assert result.rollouts == 2 * len(leases)
    assert result.failed_rollouts == len(leases) - 1
    assert result.scored_rollouts == 2 * len(leases) - result.failed_rollouts
    assert result.mean_reward == pytest.approx(1 / (2 * len(leases)))
    assert result.pass_at_k == pytest.approx(1 / len(leases))
    assert result.mean_response_tokens == pytest.approx(2.0)
    assert list(result.versions) == [buffer.version(0)]


def test_an_evaluation_takes_no_part_in_training(buffer, request):
    buffer.ready("a")
    started = _start(buffer, request)
    for lease in buffer.lease(100).leases:
        if lease.evaluation_id:
            buffer.commit(lease)
    assert _result(buffer, started.evaluation_id, wait_seconds=5).done
    stats = buffer.stats()
    assert stats.groups_ready == 0 and stats.evaluations_open == 0


def test_greedy_sampling_is_for_evaluation(buffer, request):
    buffer.ready("a", batch_groups=1)
    greedy = sample_pb2.SamplingParams(temperature=0.0, max_new_tokens=3)
    _start(buffer, request, sampling=greedy, max_prompts=1)
    leases = buffer.lease(100).leases
    evaluation = next(lease for lease in leases if lease.evaluation_id)
    assert evaluation.sampling.HasField("temperature") and evaluation.sampling.temperature == 0.0
    assert evaluation.sampling.max_new_tokens == 3
    group = build.group(evaluation, buffer.version(0))
    for rollout in group.rollouts:
        rollout.samples[0].segments[1].generation.sampling.CopyFrom(greedy)
    assert buffer.commit(evaluation, group).outcome == pb.COMMIT_OUTCOME_EVALUATED
    train = next(lease for lease in leases if not lease.evaluation_id)
    group = build.group(train, buffer.version(0))
    group.rollouts[0].samples[0].segments[1].generation.sampling.CopyFrom(greedy)
    with refused(INVALID, field="temperature"):
        buffer.commit(train, group)


def test_the_deadline_ends_an_evaluation_with_the_coverage_reached(buffer, request):
    buffer.ready("a")
    started = _start(buffer, request, deadline_seconds=0.5)
    leases = [lease for lease in buffer.lease(100).leases if lease.evaluation_id]
    buffer.commit(leases[0])
    result = _result(buffer, started.evaluation_id, wait_seconds=10)
    assert result.done
    assert (result.completed_prompts, result.prompts) == (1, started.prompts)


def test_an_evaluation_starts_once(buffer, request):
    buffer.ready("a")
    request_id = new_id()
    first = _start(buffer, request, request_id=request_id)
    assert _start(buffer, request, request_id=request_id) == first
    assert buffer.stats().evaluations_open == 1


def test_a_failed_question_is_asked_again(buffer, request):
    buffer.ready("a")
    _start(buffer, request, max_prompts=1)
    lease = next(one for one in buffer.lease(100).leases if one.evaluation_id)
    buffer.release(lease, failed=True)
    again = next(one for one in buffer.lease(100).leases if one.evaluation_id)
    assert again.prompt == lease.prompt and again.attempt == 2
