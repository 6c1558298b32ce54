"""Samples and blobs of the fake buffer."""

from __future__ import annotations

import uuid

import grpc

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.checksum import verify
from vime_proto.errors import ContractError, StatusError
from vime_proto.fakes._buffer_rows import RunRow
from vime_proto.fakes._traces import slice_trace
from vime_proto.routing.v1 import routing_pb2
from vime_proto.sample.v1 import sample_pb2
from vime_proto.sample_views import group_samples
from vime_proto.validate import validate_fetch_samples

_PART_BYTES = 1 << 20


class ContentMixin:
    """The service's calls about content; the buffer provides store and _once."""

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
            # A sample of one token has a trace without a byte.
            blob = result.routing.WhichOneof("payload") == "blob_id"
            payload = self._blob(run.run_id, result.routing.blob_id) if blob else result.routing.inline
            whole = any(chunk.compression != routing_pb2.COMPRESSION_NONE for chunk in result.routing.header.chunks)
            if whole:
                result.routing.inline = payload
            else:
                layers = request.routing_layers if request.HasField("routing_layers") else None
                result.routing.CopyFrom(slice_trace(sample.routing, payload, selection.routing_rows, layers))
        return result

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
                raise ContractError(
                    f"ranges[{index}]", f"ends at {part.offset + part.length}, the blob has {len(data)} bytes"
                )
        ranges = [(part.offset, part.offset + part.length) for part in request.ranges] or [(0, len(data))]
        for start, stop in ranges:
            for at in range(start, stop, _PART_BYTES):
                yield pb.GetBlobResponse(data=data[at : min(at + _PART_BYTES, stop)])
