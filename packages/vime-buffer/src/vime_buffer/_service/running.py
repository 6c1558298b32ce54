"""OpenRun, CloseRun, PublishVersion, ReportCheckpoint, Rewind, GetStats."""

from __future__ import annotations

import grpc

from vime_buffer._service.core import Core
from vime_buffer._store import evaluations, leases, rewind, runs, stats
from vime_buffer._store.database import Transaction
from vime_buffer._store.schema import runs as run_rows
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.errors import ContractError, StatusError
from vime_proto.validate import (
    validate_open_run,
    validate_publish_version,
    validate_report_checkpoint,
    validate_rewind,
)


class RunCalls:
    """Calls about a run as a whole."""

    core: Core

    async def OpenRun(self, request: pb.OpenRunRequest, context) -> pb.OpenRunResponse:
        validate_open_run(request)
        if len(request.run_id) > 200:
            raise ContractError("run_id", f"at most 200 characters, got {len(request.run_id)}")
        return await self.core.once(request, request.run_id, pb.OpenRunResponse, lambda tx: self._open(tx, request))

    def _open(self, tx: Transaction, request: pb.OpenRunRequest) -> pb.OpenRunResponse:
        run = runs.find(tx, request.run_id)
        stated = runs.settings_of(request)
        if run is None:
            tx.execute(
                run_rows.insert().values(
                    run_id=request.run_id,
                    lineage=request.lineage.ordinal,
                    # A history that began elsewhere: Rewind says how many batches it holds.
                    rewind_due=request.lineage.HasField("parent"),
                    source_digest=self._source_digest(),
                    **stated,
                )
            )
            runs.add_lineage(tx, request.run_id, request.lineage)
        else:
            self._take_up(tx, run, request, stated)
        tx.changed = True
        rows = len(self.core.source) or None
        return runs.open_response(tx, runs.get(tx, request.run_id), run is not None, rows)

    def _take_up(self, tx: Transaction, run: runs.Run, request: pb.OpenRunRequest, stated: dict[str, object]) -> None:
        if run.source_digest != self._source_digest():
            raise StatusError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the prompt files changed since run {run.run_id!r} was opened; its place in them is lost",
            )
        restored = runs.add_lineage(tx, run.run_id, request.lineage)
        runs.check_same(run, stated, restored)
        runs.update(tx, run.run_id, closed=False, closed_reason="", lineage=request.lineage.ordinal, **stated)
        if restored:
            rewind.open_lineage(tx, run)

    def _source_digest(self) -> str:
        return self.core.source.digest if len(self.core.source) else ""

    async def CloseRun(self, request: pb.CloseRunRequest, context) -> pb.CloseRunResponse:
        def close(tx: Transaction) -> pb.CloseRunResponse:
            run = runs.get(tx, request.run_id)
            leases.end_all(tx, run.run_id, "the run was closed")
            evaluations.abandon_all(tx, run.run_id, "the run was closed")
            runs.update(tx, run.run_id, closed=True, closed_reason=request.reason)
            tx.changed = True
            return pb.CloseRunResponse()

        return await self.core.once(request, request.run_id, pb.CloseRunResponse, close)

    async def PublishVersion(self, request: pb.PublishVersionRequest, context) -> pb.PublishVersionResponse:
        validate_publish_version(request)

        def publish(tx: Transaction) -> pb.PublishVersionResponse:
            runs.publish(tx, request.version)
            return pb.PublishVersionResponse()

        return await self.core.once(request, request.version.run_id, pb.PublishVersionResponse, publish)

    async def ReportCheckpoint(self, request: pb.ReportCheckpointRequest, context) -> pb.ReportCheckpointResponse:
        validate_report_checkpoint(request)

        def report(tx: Transaction) -> pb.ReportCheckpointResponse:
            rewind.report_checkpoint(tx, runs.get(tx, request.run_id), request)
            return pb.ReportCheckpointResponse()

        return await self.core.once(request, request.run_id, pb.ReportCheckpointResponse, report)

    async def Rewind(self, request: pb.RewindRequest, context) -> pb.RewindResponse:
        validate_rewind(request)
        return await self.core.once(
            request,
            request.run_id,
            pb.RewindResponse,
            lambda tx: rewind.rewind(tx, runs.get(tx, request.run_id), request),
        )

    async def GetStats(self, request: pb.GetStatsRequest, context) -> pb.GetStatsResponse:
        return await self.core.work(self.core.database.read, lambda tx: stats.stats(tx, request.run_id))
