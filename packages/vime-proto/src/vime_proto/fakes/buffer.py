"""An in-memory buffer. It forgets everything when it ends; compressed routing traces are stored but not cut."""

from __future__ import annotations

import asyncio

import grpc

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.buffer.v1 import buffer_pb2_grpc
from vime_proto.errors import ContractError, StatusError, nearest
from vime_proto.fakes import _buffer_batches as batches
from vime_proto.fakes._buffer_content import ContentMixin
from vime_proto.fakes._buffer_rows import EvaluationRow, PromptRow, State
from vime_proto.fakes._buffer_runs import RunsMixin
from vime_proto.fakes._buffer_store import BufferStore
from vime_proto.idempotency import RequestLog
from vime_proto.sample.v1 import sample_pb2
from vime_proto.sample_views import group_samples
from vime_proto.validate import (
    validate_batch_end,
    validate_commit_group,
    validate_group,
    validate_lease_batch,
    validate_lease_prompts,
    validate_prompt,
    validate_put_prompts,
    validate_release_lease,
    validate_renew_leases,
    validate_start_evaluation,
)

_POLL_SECONDS = 0.02


class FakeBuffer(RunsMixin, ContentMixin, buffer_pb2_grpc.BufferServiceServicer):
    """BufferService over a BufferStore; arguments go to it."""

    def __init__(self, **options):
        self.store = BufferStore(**options)
        self._log = RequestLog()

    def _once(self, request, function):
        async def execute():
            return function(request)

        return self._log.run(request.request_id, request, execute)

    async def _poll(self, request, attempt):
        """Repeats `attempt` until its outcome is not EMPTY, at most wait_seconds."""

        async def execute():
            end = asyncio.get_running_loop().time() + request.wait_seconds
            while True:
                answer = attempt(request)
                if answer.outcome != pb.LEASE_OUTCOME_EMPTY or asyncio.get_running_loop().time() >= end:
                    return answer
                await asyncio.sleep(_POLL_SECONDS)

        return await self._log.run(request.request_id, request, execute)

    # Prompts and groups ---------------------------------------------------------------------------------------

    async def PutPrompts(self, request, context):
        validate_put_prompts(request)
        return await self._once(request, self._put)

    def _put(self, request):
        run = self.store.run(request.run_id)
        response = pb.PutPromptsResponse()
        for index, prompt in enumerate(request.prompts):
            status = response.statuses.add(code=grpc.StatusCode.OK.value[0])
            try:
                validate_prompt(prompt, f"prompts[{index}]")
                known = run.prompts.get(prompt.prompt_id)
                if known is not None and known.prompt != prompt:
                    raise ContractError(
                        f"prompts[{index}].prompt_id", f"{prompt.prompt_id!r} exists with another content"
                    )
            except ContractError as error:
                status.code, status.message = grpc.StatusCode.INVALID_ARGUMENT.value[0], str(error)
            else:
                run.prompts.setdefault(prompt.prompt_id, PromptRow(prompt))
        return response

    async def LeasePrompts(self, request, context):
        validate_lease_prompts(request)
        return await self._poll(request, lambda r: self.store.lease_prompts(self.store.ready_run(r.run_id), r))

    async def RenewLeases(self, request, context):
        validate_renew_leases(request)
        directives = self.store.renew(self.store.run(request.run_id), request.lease_ids)
        return pb.RenewLeasesResponse(directives=directives, ttl_seconds=self.store.ttl)

    async def CommitGroup(self, request, context):
        validate_commit_group(request)
        return await self._once(request, self._commit)

    def _commit(self, request):
        run = self.store.run(request.run_id)
        lease = self.store.held(run, request.lease_id, False)
        if lease.attempt != request.attempt:
            raise StatusError(grpc.StatusCode.ABORTED, f"lease_id {lease.lease_id!r} is for attempt {lease.attempt}")
        row = run.prompts[lease.target]
        size = row.prompt.group_size or run.opened.group_size
        if request.group.group_id != lease.target:
            raise ContractError("group.group_id", f"the lease is for {lease.target!r}, got {request.group.group_id!r}")
        validate_group(request.group, group_size=size, evaluation=bool(row.evaluation_id))
        known = {s.sample_id for other in run.prompts.values() if other.group for s in group_samples(other.group)}
        for sample in group_samples(request.group):
            if sample.sample_id in known:
                raise ContractError("group.rollouts.samples.sample_id", f"{sample.sample_id!r} exists")
        return self.store.commit(run, lease, request.group)

    async def ReleaseLease(self, request, context):
        validate_release_lease(request)
        return await self._once(request, self._release)

    def _release(self, request):
        run = self.store.run(request.run_id)
        lease = self.store.held(run, request.lease_id, False)
        row = run.prompts[lease.target]
        row.partial = list(request.partial)
        self.store.end_lease(run, lease)
        if request.failed:
            self.store.fail(run, row)
        return pb.ReleaseLeaseResponse()

    # Batches --------------------------------------------------------------------------------------------------

    async def LeaseBatch(self, request, context):
        validate_lease_batch(request)
        return await self._poll(request, lambda r: batches.lease_batch(self.store, self.store.ready_run(r.run_id), r))

    async def AckBatch(self, request, context):
        validate_batch_end(request)
        return await self._once(request, lambda r: batches.ack(self.store, self.store.run(r.run_id), r.lease_id))

    async def NackBatch(self, request, context):
        validate_batch_end(request)
        return await self._once(request, lambda r: batches.nack(self.store, self.store.run(r.run_id), r))

    # Evaluation and counters ----------------------------------------------------------------------------------

    async def StartEvaluation(self, request, context):
        validate_start_evaluation(request)
        return await self._once(request, self._start_evaluation)

    def _start_evaluation(self, request):
        run = self.store.run(request.run_id)
        if request.set not in self.store.sets:
            raise StatusError(
                grpc.StatusCode.NOT_FOUND, f"set: {nearest(request.set, self.store.sets, 'evaluation set')}"
            )
        questions = list(self.store.sets[request.set])[: request.max_prompts or None]
        evaluation_id = f"evaluation-{len(run.evaluations)}"
        size = request.rollouts_per_prompt or 1
        seconds = request.deadline_seconds if request.HasField("deadline_seconds") else 3600.0
        one = EvaluationRow(request, [], size, self.store.clock() + seconds)
        for question in questions:
            prompt = sample_pb2.Prompt()
            prompt.CopyFrom(question)
            prompt.prompt_id, prompt.group_size = f"{evaluation_id}/{question.prompt_id}", size
            run.prompts[prompt.prompt_id] = PromptRow(prompt, evaluation_id)
            one.prompt_ids.append(prompt.prompt_id)
        run.evaluations[evaluation_id] = one
        return pb.StartEvaluationResponse(evaluation_id=evaluation_id, prompts=len(questions))

    async def GetEvaluationResult(self, request, context):
        run = self.store.run(request.run_id)
        if request.evaluation_id not in run.evaluations:
            raise StatusError(grpc.StatusCode.NOT_FOUND, f"evaluation_id: no evaluation {request.evaluation_id!r}")
        end = asyncio.get_running_loop().time() + request.wait_seconds
        while True:
            self.store.run(request.run_id)
            answer = batches.evaluation_result(self.store, run, run.evaluations[request.evaluation_id])
            if answer.done or asyncio.get_running_loop().time() >= end:
                return answer
            await asyncio.sleep(_POLL_SECONDS)

    async def GetStats(self, request, context):
        run = self.store.run(request.run_id)
        stats = pb.GetStatsResponse()
        stats.CopyFrom(run.stats)
        stats.prompts_leased = len(run.training(State.LEASED))
        stats.groups_ready = len(run.training(State.READY))
        stats.groups_batch_leased = sum(len(batch.group_ids) for batch in run.batches if batch.leased)
        stats.batches_trained, stats.capacity, stats.closed = run.trained, run.capacity(), run.closed
        stats.prompts_requeued = len([row for row in run.training(State.PENDING) if row.attempts])
        stats.evaluations_open = sum(not one.done for one in run.evaluations.values())
        stats.payload_bytes = sum(row.group.ByteSize() for row in run.prompts.values() if row.group)
        if run.version is not None:
            stats.version = run.version.number
        return stats
