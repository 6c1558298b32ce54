"""Samples on their way out: only the parts asked for."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import sqlalchemy as sa

from vime_buffer._files import BlobFiles
from vime_buffer._store import payloads, runs
from vime_buffer._store.database import Database, Transaction
from vime_buffer._store.schema import samples
from vime_buffer._traces import cut
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.common.v1 import common_pb2
from vime_proto.routing.v1 import routing_pb2
from vime_proto.sample.v1 import sample_pb2

_ALL_FIELDS = frozenset(
    (pb.SAMPLE_FIELD_TOKENS, pb.SAMPLE_FIELD_GENERATION, pb.SAMPLE_FIELD_ROUTING, pb.SAMPLE_FIELD_STREAMS)
)


class Fetcher:
    """Reads samples; for worker threads.

    Args:
        database, files: where they lie.
        run_id: of the run.
        fields: parts wanted; empty for all.
        layers: numbers of the layers whose routes are wanted; None for all.
    """

    def __init__(
        self,
        database: Database,
        files: BlobFiles,
        run_id: str,
        fields: Sequence[int],
        layers: tuple[int, int] | None,
    ):
        self._database, self._files, self._run_id = database, files, run_id
        self._fields = frozenset(fields) or _ALL_FIELDS
        self._layers = layers

    def fetch(self, selections: Sequence[pb.SampleSelection]) -> list[pb.FetchSamplesResponse]:
        """One answer per selection, in order; an unknown id is reported in its place."""
        rows = self._database.read(lambda tx: self._rows(tx, [one.sample_id for one in selections]))
        return [self._answer(rows.get(one.sample_id), one) for one in selections]

    def _rows(self, tx: Transaction, ids: list[str]) -> dict[str, sa.Row]:
        runs.get(tx, self._run_id)
        wanted = [samples.c.sample_id, samples.c.body, samples.c.body_blob]
        if pb.SAMPLE_FIELD_ROUTING in self._fields:
            wanted += [samples.c.trace, samples.c.trace_blob, samples.c.trace_uri]
        rows = tx.execute(sa.select(*wanted).where(samples.c.run_id == self._run_id, samples.c.sample_id.in_(ids)))
        return {row.sample_id: row for row in rows}

    def _answer(self, row: sa.Row | None, selection: pb.SampleSelection) -> pb.FetchSamplesResponse:
        try:
            sample = None if row is None else self._sample(row, selection)
        except FileNotFoundError:
            # Collected between the read of the row and of the file.
            sample = None
        if sample is None:
            message = f"no sample {selection.sample_id!r} in run {self._run_id!r}"
            return pb.FetchSamplesResponse(
                sample=sample_pb2.Sample(sample_id=selection.sample_id),
                status=common_pb2.ItemStatus(code=grpc.StatusCode.NOT_FOUND.value[0], message=message),
            )
        return pb.FetchSamplesResponse(sample=sample, status=common_pb2.ItemStatus(code=0))

    def _sample(self, row: sa.Row, selection: pb.SampleSelection) -> sample_pb2.Sample:
        body = row.body if row.body is not None else self._files.read(self._path(row.body_blob))
        sample = sample_pb2.Sample.FromString(body)
        header = routing_pb2.RoutingTraceHeader()
        has_routing = sample.HasField("routing")
        if has_routing:
            header.CopyFrom(sample.routing.header)
            sample.ClearField("routing")
        if self._fields != _ALL_FIELDS:
            self._strip(sample)
        if has_routing and pb.SAMPLE_FIELD_ROUTING in self._fields:
            rows = [(one.start, one.stop) for one in selection.routing_rows]
            sample.routing.CopyFrom(cut(header, rows, self._layers, self._reader(row)))
        return sample

    def _strip(self, sample: sample_pb2.Sample) -> None:
        for segment in sample.segments:
            if pb.SAMPLE_FIELD_TOKENS not in self._fields:
                segment.ClearField("token_ids")
                segment.ClearField("trainable_all")
                segment.ClearField("trainable_mask")
                segment.ClearField("role")
            if pb.SAMPLE_FIELD_GENERATION not in self._fields:
                segment.ClearField("generation")
                segment.ClearField("reward")
            if pb.SAMPLE_FIELD_STREAMS not in self._fields:
                segment.ClearField("streams")

    def _reader(self, row: sa.Row):
        if row.trace is not None:
            view = memoryview(row.trace)
            return lambda offset, length: view[offset : offset + length]
        if row.trace_uri:
            return lambda offset, length: self._files.read_uri(row.trace_uri, offset, length)
        path = self._path(row.trace_blob)
        return lambda offset, length: self._files.read(path, offset, length)

    def _path(self, blob_id: str) -> str:
        file = self._database.read(lambda tx: payloads.find_blob(tx, self._run_id, blob_id))
        if file is None:
            raise FileNotFoundError(blob_id)
        return file.path
