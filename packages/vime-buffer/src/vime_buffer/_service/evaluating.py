"""StartEvaluation, GetEvaluationResult."""

from __future__ import annotations

import uuid

import grpc

from vime_buffer._service.core import Core
from vime_buffer._store import evaluations, runs
from vime_buffer._store.database import Transaction
from vime_buffer.settings import sampling_params
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.errors import ContractError, StatusError, nearest
from vime_proto.sample.v1 import sample_pb2
from vime_proto.validate import validate_start_evaluation

# A result is as many commits away as there are prompts, and nobody waits for it in a hot loop.
_SETTLE_SECONDS = 0.05


class EvaluationCalls:
    """Calls about evaluations."""

    core: Core

    async def StartEvaluation(self, request: pb.StartEvaluationRequest, context) -> pb.StartEvaluationResponse:
        validate_start_evaluation(request)
        source = self.core.evaluation_sets.get(request.set)
        if source is None:
            raise StatusError(
                grpc.StatusCode.NOT_FOUND, nearest(request.set, self.core.evaluation_sets, "evaluation set")
            )
        configured = self.core.settings.evaluation[request.set]
        count = min(len(source), request.max_prompts or len(source))
        questions = await self.core.work(source.read, 0, count, None, 1)
        bad = [one.reason for one in questions if not one.formatted]
        if bad:
            raise StatusError(
                grpc.StatusCode.FAILED_PRECONDITION, f"evaluation set {request.set!r}: {len(bad)} bad rows; {bad[0]}"
            )
        sampling = overlay(sampling_params(configured.sampling), request.sampling)
        k = request.rollouts_per_prompt or configured.rollouts_per_prompt
        version = request.version
        name = f"{request.set}-{version.lineage}-{version.number}-{uuid.uuid4().hex[:8]}"

        def start(tx: Transaction) -> pb.StartEvaluationResponse:
            run = runs.get(tx, request.run_id)
            if run.closed:
                raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, f"run {run.run_id!r} is closed")
            runs.check_present(run, version)
            return evaluations.start(tx, run, request, name, [one.prompt for one in questions], sampling, k)

        response = await self.core.once(request, request.run_id, pb.StartEvaluationResponse, start)
        self.core.due.set()
        return response

    async def GetEvaluationResult(
        self, request: pb.GetEvaluationResultRequest, context
    ) -> pb.GetEvaluationResultResponse:
        if not request.wait_seconds >= 0:
            raise ContractError("wait_seconds", f"must be at least 0, got {request.wait_seconds}")

        def look(tx: Transaction, last: bool) -> pb.GetEvaluationResultResponse:
            # Summing up reads every answer: worth it only when somebody is told.
            if not last and evaluations.is_open(tx, request.run_id, request.evaluation_id):
                return pb.GetEvaluationResultResponse()
            runs.get(tx, request.run_id)
            return evaluations.result(tx, request.run_id, request.evaluation_id)

        async def attempt(last: bool) -> pb.GetEvaluationResultResponse:
            return await self.core.work(self.core.database.read, lambda tx: look(tx, last))

        return await self.core.poll(request.wait_seconds, attempt, lambda response: not response.done, _SETTLE_SECONDS)


def overlay(base: sample_pb2.SamplingParams, over: sample_pb2.SamplingParams) -> sample_pb2.SamplingParams:
    """``base`` with each field that ``over`` sets; a list replaces the list."""
    result = sample_pb2.SamplingParams()
    result.CopyFrom(base)
    for field, _ in over.ListFields():
        result.ClearField(field.name)
    result.MergeFrom(over)
    return result
