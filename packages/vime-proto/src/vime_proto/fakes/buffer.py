"""An in-memory buffer. It forgets everything when it ends; compressed routing traces are stored but not cut."""

from __future__ import annotations

import asyncio
import uuid

import grpc

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.buffer.v1 import buffer_pb2_grpc
from vime_proto.checksum import verify
from vime_proto.errors import ContractError, StatusError, nearest
from vime_proto.fakes import _buffer_batches as batches
from vime_proto.fakes._buffer_rows import EvaluationRow, PromptRow, RunRow, State
from vime_proto.fakes._buffer_store import BufferStore
from vime_proto.fakes._traces import slice_trace
from vime_proto.idempotency import RequestLog
from vime_proto.routing.v1 import routing_pb2
from vime_proto.sample.v1 import sample_pb2
from vime_proto.sample_views import group_samples
from vime_proto.validate import (
    validate_batch_end,
    validate_commit_group,
    validate_fetch_samples,
    validate_group,
    validate_lease_batch,
    validate_lease_prompts,
    validate_open_run,
    validate_prompt,
    validate_publish_version,
    validate_put_prompts,
    validate_release_lease,
    validate_renew_leases,
    validate_report_checkpoint,
    validate_rewind,
    validate_start_evaluation,
)
from vime_proto.version import LineageTree, policy_version, show

_POLL_SECONDS = 0.02
_PART_BYTES = 1 << 20


class FakeBuffer(buffer_pb2_grpc.BufferServiceServicer):
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

    # Runs -----------------------------------------------------------------------------------------------------

    async def OpenRun(self, request, context):
        validate_open_run(request)
        return await self._once(request, self._open)

    def _open(self, request):
        existed = request.run_id in self.store.runs
        if not existed:
            self.store.runs[request.run_id] = RunRow(request, LineageTree([request.lineage]))
        run = self.store.run(request.run_id)
        newest = run.tree.current
        if request.lineage.ordinal < newest:
            raise StatusError(grpc.StatusCode.ABORTED, f"lineage {request.lineage.ordinal} was superseded by {newest}")
        for name in ("batch_groups", "group_size"):
            if getattr(run.opened, name) != getattr(request, name):
                was = getattr(run.opened, name)
                raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, f"run {request.run_id!r} was opened with {name} {was}")
        run.tree.add(request.lineage)
        if run.tree.current != newest:
            for lease in list(run.leases.values()):
                self.store.end_lease(run, lease)
            run.version, run.rewind_due = None, True
        run.opened = request
        trained = min(run.trained, request.lineage.forked_at) if run.rewind_due else run.trained
        return pb.OpenRunResponse(
            trained=trained, version=run.version, existed=existed, lineage=request.lineage, source_rows=len(self.store.source)
        )

    async def CloseRun(self, request, context):
        return await self._once(request, self._close)

    def _close(self, request):
        self.store.run(request.run_id).closed = True
        return pb.CloseRunResponse()

    async def PublishVersion(self, request, context):
        validate_publish_version(request)
        return await self._once(request, self._publish)

    def _publish(self, request):
        run = self.store.ready_run(request.version.run_id)
        if request.version.lineage != run.tree.current:
            raise StatusError(grpc.StatusCode.ABORTED, f"version {show(request.version)} is not of lineage {run.tree.current}")
        if request.version.number > run.trained:
            raise ContractError("version.number", f"{show(request.version)} exceeds the {run.trained} acked batches")
        if run.version is not None and request.version.number < run.version.number:
            raise ContractError("version.number", f"{show(request.version)} is below the published {run.version.number}")
        run.version = policy_version(run.run_id, run.tree.current, request.version.number)
        return pb.PublishVersionResponse()

    async def ReportCheckpoint(self, request, context):
        validate_report_checkpoint(request)
        return await self._once(request, self._checkpoint)

    def _checkpoint(self, request):
        run = self.store.ready_run(request.run_id)
        if request.batch > run.trained:
            raise ContractError("batch", f"{request.batch} exceeds the {run.trained} acked batches")
        batches.collect(run, request.oldest_restorable)
        return pb.ReportCheckpointResponse()

    async def Rewind(self, request, context):
        validate_rewind(request)
        run = self.store.run(request.run_id)
        return await self._once(request, lambda _: batches.rewind(self.store, run, request))

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
                    raise ContractError(f"prompts[{index}].prompt_id", f"{prompt.prompt_id!r} exists with another content")
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

    async def FetchSamples(self, request, context):
        validate_fetch_samples(request)
        run = self.store.run(request.run_id)
        known = {s.sample_id: s for row in run.prompts.values() if row.group for s in group_samples(row.group)}
        for selection in request.samples:
            sample = known.get(selection.sample_id)
            if sample is None:
                answer = pb.FetchSamplesResponse()
                answer.sample.sample_id = selection.sample_id
                answer.status.code = grpc.StatusCode.NOT_FOUND.value[0]
                answer.status.message = f"sample_id: no sample {selection.sample_id!r} in run {request.run_id!r}"
                yield answer
                continue
            answer = pb.FetchSamplesResponse(sample=self._part(run, sample, selection, request))
            answer.status.code = 0
            yield answer

    def _part(self, run: RunRow, sample: sample_pb2.Sample, selection, request) -> sample_pb2.Sample:
        wanted = set(request.fields) or set(pb.SampleField.values())
        result = sample_pb2.Sample()
        result.CopyFrom(sample)
        drop = {
            pb.SAMPLE_FIELD_TOKENS: ("token_ids", "trainable_all", "trainable_mask"),
            pb.SAMPLE_FIELD_GENERATION: ("generation",),
            pb.SAMPLE_FIELD_STREAMS: ("streams",),
        }
        for segment in result.segments:
            for name in (name for field, names in drop.items() if field not in wanted for name in names):
                segment.ClearField(name)
        if pb.SAMPLE_FIELD_ROUTING not in wanted:
            result.ClearField("routing")
        elif result.HasField("routing"):
            payload = result.routing.inline or self._blob(run.run_id, result.routing.blob_id)
            whole = any(chunk.compression != routing_pb2.COMPRESSION_NONE for chunk in result.routing.header.chunks)
            if whole:
                result.routing.inline = payload
            else:
                layers = request.routing_layers if request.HasField("routing_layers") else None
                result.routing.CopyFrom(slice_trace(sample.routing, payload, selection.routing_rows, layers))
        return result

    # Blobs ----------------------------------------------------------------------------------------------------

    async def PutBlob(self, requests, context):
        first = last = None
        data = bytearray()
        async for request in requests:
            first, last = first or request, request
            data += request.data
        if first is None or not first.run_id:
            raise ContractError("run_id", "must be set in the first message")
        self.store.run(first.run_id)
        if not last.HasField("checksum"):
            raise ContractError("checksum", "must be set in the last message")
        whole = pb.PutBlobRequest(
            run_id=first.run_id, request_id=first.request_id, data=bytes(data), checksum=last.checksum
        )
        return await self._once(whole, self._put_blob)

    def _put_blob(self, request):
        verify(request.data, request.checksum, f"blob of request {request.request_id!r}")
        blob_id = uuid.uuid4().hex
        self.store.blobs[request.run_id, blob_id] = request.data
        return pb.PutBlobResponse(blob_id=blob_id, length=len(request.data))

    def _blob(self, run_id: str, blob_id: str) -> bytes:
        if (run_id, blob_id) not in self.store.blobs:
            raise StatusError(grpc.StatusCode.NOT_FOUND, f"blob_id: no blob {blob_id!r} in run {run_id!r}")
        return self.store.blobs[run_id, blob_id]

    async def GetBlob(self, request, context):
        data = self._blob(request.run_id, request.blob_id)
        for index, part in enumerate(request.ranges):
            if part.offset + part.length > len(data):
                raise ContractError(f"ranges[{index}]", f"ends at {part.offset + part.length}, the blob has {len(data)} bytes")
        ranges = [(part.offset, part.offset + part.length) for part in request.ranges] or [(0, len(data))]
        for start, stop in ranges:
            for at in range(start, stop, _PART_BYTES):
                yield pb.GetBlobResponse(data=data[at : min(at + _PART_BYTES, stop)])

    # Evaluation and counters ----------------------------------------------------------------------------------

    async def StartEvaluation(self, request, context):
        validate_start_evaluation(request)
        return await self._once(request, self._start_evaluation)

    def _start_evaluation(self, request):
        run = self.store.run(request.run_id)
        if request.set not in self.store.sets:
            raise StatusError(grpc.StatusCode.NOT_FOUND, f"set: {nearest(request.set, self.store.sets, 'evaluation set')}")
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
