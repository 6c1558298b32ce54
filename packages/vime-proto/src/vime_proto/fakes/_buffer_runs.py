"""Runs of the fake buffer: opening, lineages, publication, checkpoints, rewind."""

from __future__ import annotations

import grpc

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.errors import ContractError, StatusError
from vime_proto.fakes import _buffer_batches as batches
from vime_proto.fakes._buffer_rows import RunRow
from vime_proto.validate import (
    validate_open_run,
    validate_publish_version,
    validate_report_checkpoint,
    validate_rewind,
)
from vime_proto.version import LineageTree, policy_version, show


class RunsMixin:
    """The service's calls about runs; the buffer provides store and _once."""

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
                raise StatusError(
                    grpc.StatusCode.FAILED_PRECONDITION, f"run {request.run_id!r} was opened with {name} {was}"
                )
        run.tree.add(request.lineage)
        if run.tree.current != newest:
            for lease in list(run.leases.values()):
                self.store.end_lease(run, lease)
            run.version, run.rewind_due = None, True
        run.opened = request
        trained = min(run.trained, request.lineage.forked_at) if run.rewind_due else run.trained
        return pb.OpenRunResponse(
            trained=trained,
            version=run.version,
            existed=existed,
            lineage=request.lineage,
            source_rows=len(self.store.source),
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
            raise StatusError(
                grpc.StatusCode.ABORTED, f"version {show(request.version)} is not of lineage {run.tree.current}"
            )
        if request.version.number > run.trained:
            raise ContractError("version.number", f"{show(request.version)} exceeds the {run.trained} acked batches")
        if run.version is not None and request.version.number < run.version.number:
            raise ContractError(
                "version.number", f"{show(request.version)} is below the published {run.version.number}"
            )
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
