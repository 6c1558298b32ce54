"""LeaseBatch, FetchSamples, AckBatch, NackBatch."""

from __future__ import annotations

from vime_buffer._fetching import Fetcher
from vime_buffer._service.core import Core
from vime_buffer._service.grants import Grants
from vime_buffer._store import batches, granting, leases, requests, runs
from vime_buffer._store.database import Transaction
from vime_buffer._store.runs import Run
from vime_buffer._store.schema import LeaseKind
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.validate import validate_batch_end, validate_fetch_samples, validate_lease_batch

# Samples read together: enough to spread the cost of a query, few enough to stream from the start.
_FETCH_TOGETHER = 16


class TrainingCalls:
    """Calls of the trainer about batches."""

    core: Core
    grants: Grants

    async def LeaseBatch(self, request: pb.LeaseBatchRequest, context) -> pb.LeaseBatchResponse:
        validate_lease_batch(request)
        digest = requests.fingerprint(request)

        async def look(last: bool) -> pb.LeaseBatchResponse:
            return await self.core.once(
                request,
                request.run_id,
                pb.LeaseBatchResponse,
                lambda tx: self._lease_batch(tx, request, last),
                digest,
                lambda response: response.outcome == pb.LEASE_OUTCOME_GRANTED,
            )

        return await self.grants.poll(request, look)

    def _lease_batch(self, tx: Transaction, request: pb.LeaseBatchRequest, last: bool) -> pb.LeaseBatchResponse:
        run = runs.get(tx, request.run_id)
        if run.closed:
            return pb.LeaseBatchResponse(outcome=pb.LEASE_OUTCOME_END_OF_DATA)
        batches.check_rewound(run)
        leases.lapse(tx, run.run_id)
        leases.enter(tx, run.run_id, LeaseKind.BATCH, request.holder, request.incarnation)
        ended = self._data_ended(tx, run, last)
        response = batches.lease(tx, run, request.holder, request.incarnation, self.core.ttl, ended)
        if response.outcome == pb.LEASE_OUTCOME_EMPTY and self._data_ended(tx, run, last):
            if not granting.groups_left(tx, run.run_id):
                response.outcome = pb.LEASE_OUTCOME_END_OF_DATA
        return response

    def _data_ended(self, tx: Transaction, run: Run, last: bool) -> bool:
        """Whether no group will come but those that wait.

        Without a configured source more prompts may be put at any time: the end is taken for granted only when some were
        put, all are done, and the caller's wait is over.
        """
        if not len(self.core.source) and not (last and granting.train_data_seen(tx, run.run_id)):
            return False
        if not self.core.source.exhausted(run.source_position, run.epochs):
            return False
        return not granting.train_data_left(tx, run.run_id)

    async def FetchSamples(self, request: pb.FetchSamplesRequest, context):
        validate_fetch_samples(request)
        layers = request.routing_layers
        fetcher = Fetcher(
            self.core.database,
            self.core.files,
            request.run_id,
            request.fields,
            (layers.start, layers.stop) if request.HasField("routing_layers") else None,
        )
        for start in range(0, len(request.samples), _FETCH_TOGETHER):
            for answer in await self.core.work(fetcher.fetch, request.samples[start : start + _FETCH_TOGETHER]):
                yield answer

    async def AckBatch(self, request: pb.AckBatchRequest, context) -> pb.AckBatchResponse:
        validate_batch_end(request)
        return await self.core.once(
            request,
            request.run_id,
            pb.AckBatchResponse,
            lambda tx: batches.ack(tx, runs.get(tx, request.run_id), request.lease_id),
        )

    async def NackBatch(self, request: pb.NackBatchRequest, context) -> pb.NackBatchResponse:
        validate_batch_end(request)

        def nack(tx: Transaction) -> pb.NackBatchResponse:
            batches.nack(tx, runs.get(tx, request.run_id), request)
            return pb.NackBatchResponse()

        return await self.core.once(request, request.run_id, pb.NackBatchResponse, nack)
