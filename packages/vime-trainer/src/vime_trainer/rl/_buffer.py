"""The buffer's client: every mutating call keeps its request id until it is answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import grpc

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.buffer.v1 import buffer_pb2_grpc
from vime_proto.channel import call
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import describe
from vime_proto.sample.v1 import sample_pb2
from vime_trainer.batch import BatchIndex
from vime_trainer.settings.rl import RlSettings

from ._batches import LeasedBatch, NotYet
from ._io import IoThread
from ._needed import NeededRoutes, Range

log = logging.getLogger(__name__)

_TIMEOUT = 30.0
_HOLDER = "trainer"


def _selection(index: BatchIndex, sample: int, routes: NeededRoutes | None) -> pb.SampleSelection:
    selection = pb.SampleSelection(sample_id=index.sample_ids[sample])
    rows = int(index.lengths[sample]) - 1
    if routes is not None and routes.rows[sample] != [(0, rows)]:
        # No range at all would ask for every row; an empty one asks for the header, by which a trace is checked.
        for start, stop in routes.rows[sample] or [(0, 0)]:
            selection.routing_rows.add(start=start, stop=stop)
    return selection


def _add_layers(sample: sample_pb2.Sample, other: sample_pb2.Sample) -> None:
    """Adds the layers of the other's routes, of the same rows. A sample without routes is refused by whoever reads it."""
    from vime_r3.shards import join_layers

    have, more = sample.routing.header.layer_ids, other.routing.header.layer_ids
    # A buffer that cannot cut a trace delivers all of it.
    if other.HasField("routing") and not set(more) <= set(have):
        sample.routing.CopyFrom(join_layers([sample.routing, other.routing]))


class LostLeaseError(RuntimeError):
    """The buffer gave the batch to somebody else although it is in these weights: resume from the last checkpoint."""


class BufferClient:
    """Calls of one trainer process.

    Args:
        settings: of the run.
        io: where calls are made.
        channel: to the buffer, made there.
        incarnation: changes with every start; part of every request id.
    """

    def __init__(self, settings: RlSettings, io: IoThread, channel: grpc.aio.Channel, incarnation: str):
        self._settings = settings
        self._io = io
        self._incarnation = incarnation
        self._count = 0
        self._renewal = None
        self._stub = buffer_pb2_grpc.BufferServiceStub(channel)

    # The run -----------------------------------------------------------------------------------------------------

    def open_run(self, lineage: common.Lineage) -> pb.OpenRunResponse:
        """Opens the run, or takes it up."""
        settings = self._settings
        request = pb.OpenRunRequest(
            request_id=self._id("open"),
            run_id=settings.run_id,
            batch_groups=settings.batch.groups,
            group_size=settings.batch.group_size,
            max_staleness=settings.max_staleness,
            seed=settings.seed,
            lineage=lineage,
            publish_interval=settings.publish_interval,
            max_attempts=settings.batch.max_attempts,
            epochs=settings.batch.epochs,
        )
        return self._call(self._stub.OpenRun, request)

    def rewind(self, batch: int, lineage: common.Lineage) -> pb.RewindResponse:
        """Goes back to a checkpoint."""
        request = pb.RewindRequest(
            request_id=self._id("rewind"), run_id=self._settings.run_id, batch=batch, lineage=lineage
        )
        return self._call(self._stub.Rewind, request)

    def publish_version(self, version: common.PolicyVersion) -> None:
        """Engines run this version."""
        self._call(self._stub.PublishVersion, pb.PublishVersionRequest(request_id=self._id("publish"), version=version))

    def report_checkpoint(self, batch: int, oldest: int) -> None:
        """A checkpoint exists; what only older ones than `oldest` need may go."""
        request = pb.ReportCheckpointRequest(
            request_id=self._id("checkpoint"), run_id=self._settings.run_id, batch=batch, oldest_restorable=oldest
        )
        self._call(self._stub.ReportCheckpoint, request)

    def close_run(self, reason: str) -> None:
        """Ends the run: workers see the end of the data."""
        request = pb.CloseRunRequest(request_id=self._id("close"), run_id=self._settings.run_id, reason=reason)
        self._call(self._stub.CloseRun, request)

    # Evaluations -------------------------------------------------------------------------------------------------

    def start_evaluation(self, request: pb.StartEvaluationRequest) -> pb.StartEvaluationResponse:
        """Starts an evaluation; run and request id are filled in."""
        request.request_id, request.run_id = self._id("evaluate"), self._settings.run_id
        return self._call(self._stub.StartEvaluation, request)

    async def evaluation_result(self, evaluation_id: str, wait_seconds: float) -> pb.GetEvaluationResultResponse:
        """Asks for a result; runs on the io thread."""
        request = pb.GetEvaluationResultRequest(
            run_id=self._settings.run_id, evaluation_id=evaluation_id, wait_seconds=wait_seconds
        )
        return await self._acall(self._stub.GetEvaluationResult, request, wait_seconds)

    # Batches -----------------------------------------------------------------------------------------------------

    def lease(self, wait_seconds: float = 2.0) -> LeasedBatch | None:
        """See `BatchSource.lease`. The lease is renewed until the batch is acked or nacked."""
        request = pb.LeaseBatchRequest(
            request_id=self._id("lease"),
            run_id=self._settings.run_id,
            holder=_HOLDER,
            incarnation=self._incarnation,
            wait_seconds=wait_seconds,
        )
        answer = self._io.run(self._acall(self._stub.LeaseBatch, request, wait_seconds))
        if answer.outcome == pb.LEASE_OUTCOME_END_OF_DATA:
            return None
        if answer.outcome != pb.LEASE_OUTCOME_GRANTED:
            raise NotYet
        self._renewal = self._io.spawn(self._renew(answer.lease_id, answer.ttl_seconds))
        return LeasedBatch.from_message(answer, self._settings.batch.group_size)

    def fetch(
        self, leased: LeasedBatch, samples: Sequence[int] | None = None, routes: NeededRoutes | None = None
    ) -> Mapping[str, sample_pb2.Sample]:
        """See `SampleSource.fetch`."""
        index = leased.index
        chosen = range(len(index.sample_ids)) if samples is None else samples
        selections = [_selection(index, sample, routes) for sample in chosen]
        return self._io.run(self._fetch(selections, routes))

    def ack(self, leased: LeasedBatch) -> int:
        """See `BatchSource.ack`.

        Raises:
            LostLeaseError: the lease lapsed or was fenced.
        """
        self._stop_renewal()
        request = pb.AckBatchRequest(request_id=self._id("ack"), run_id=self._settings.run_id, lease_id=leased.lease_id)
        try:
            return self._call(self._stub.AckBatch, request).trained
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.ABORTED:
                raise
            raise LostLeaseError(f"batch {leased.index.batch_id!r}: {describe(error)}") from error

    def nack(self, leased: LeasedBatch, refused: Mapping[str, str]) -> None:
        """See `BatchSource.nack`."""
        self._stop_renewal()
        request = pb.NackBatchRequest(
            request_id=self._id("nack"),
            run_id=self._settings.run_id,
            lease_id=leased.lease_id,
            refused_samples=refused,
            reason="samples refused" if refused else "given up",
        )
        self._call(self._stub.NackBatch, request)

    def close(self) -> None:
        """Renews no lease any more."""
        self._stop_renewal()

    def _stop_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    async def _renew(self, lease_id: str, ttl_seconds: float) -> None:
        request = pb.RenewLeasesRequest(run_id=self._settings.run_id, lease_ids=[lease_id])
        while True:
            await asyncio.sleep(max(ttl_seconds / 3, 0.05))
            try:
                answer = await call(self._stub.RenewLeases, request, timeout=max(ttl_seconds / 3, 1.0))
            except grpc.RpcError as error:
                # It may still work before the lease lapses; if not, the ack says so.
                log.warning("renewal of batch lease %s: %s", lease_id, describe(error))
                continue
            if list(answer.directives) != [pb.LEASE_DIRECTIVE_CONTINUE]:
                log.warning("batch lease %s is lost; its ack will be refused", lease_id)
                return
            ttl_seconds = answer.ttl_seconds or ttl_seconds

    async def _fetch(
        self, selections: Sequence[pb.SampleSelection], routes: NeededRoutes | None
    ) -> dict[str, sample_pb2.Sample]:
        size = self._settings.batch.fetch_samples
        parts = [selections[at : at + size] for at in range(0, len(selections), size)]
        samples: dict[str, sample_pb2.Sample] = {}
        # A few streams side by side hide the round trip.
        limit = asyncio.Semaphore(4)

        async def one(part: Sequence[pb.SampleSelection]) -> None:
            async with limit:
                samples.update(await self._fetch_part(part, routes))

        await asyncio.gather(*(one(part) for part in parts))
        return samples

    async def _fetch_part(
        self, selections: Sequence[pb.SampleSelection], routes: NeededRoutes | None
    ) -> dict[str, sample_pb2.Sample]:
        first, *others = (None if routes is None else routes.layer_ranges) or [None]
        fields = [pb.SAMPLE_FIELD_TOKENS, pb.SAMPLE_FIELD_GENERATION, pb.SAMPLE_FIELD_STREAMS]
        if self._settings.r3 == "replay" and (routes is None or routes.layers != ()):
            fields.append(pb.SAMPLE_FIELD_ROUTING)
        found = await self._fetch_fields(selections, fields, first)
        for layers in others:
            more = await self._fetch_fields(selections, [pb.SAMPLE_FIELD_ROUTING], layers)
            found = {name: sample for name, sample in found.items() if name in more}
            for name, sample in found.items():
                _add_layers(sample, more[name])
        return found

    async def _fetch_fields(
        self, selections: Sequence[pb.SampleSelection], fields: Sequence[int], layers: Range | None
    ) -> dict[str, sample_pb2.Sample]:
        request = pb.FetchSamplesRequest(run_id=self._settings.run_id, samples=selections, fields=fields)
        if layers is not None:
            request.routing_layers.start, request.routing_layers.stop = layers

        async def read(request, timeout=None, metadata=None) -> dict[str, sample_pb2.Sample]:
            found = {}
            async for answer in self._stub.FetchSamples(request, timeout=timeout):
                if answer.status.code == 0:
                    found[answer.sample.sample_id] = answer.sample
                else:
                    log.warning("fetch of samples: %s", answer.status.message)
            return found

        return await call(read, request, timeout=300.0, deadline=300.0 + self._settings.buffer_retry_seconds)

    def _id(self, what: str) -> str:
        self._count += 1
        return f"{self._incarnation}/{what}/{self._count}"

    def _call(self, method, request):
        return self._io.run(self._acall(method, request))

    async def _acall(self, method, request, wait_seconds: float = 0.0):
        timeout = _TIMEOUT + wait_seconds
        return await call(method, request, timeout=timeout, deadline=timeout + self._settings.buffer_retry_seconds)
