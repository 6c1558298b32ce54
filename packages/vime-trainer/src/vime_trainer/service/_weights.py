"""WeightService: lets an engine that came late, or restarted, catch up before it serves."""

from __future__ import annotations

import grpc

from vime_proto.errors import ContractError, StatusError
from vime_proto.idempotency import RequestLog
from vime_proto.weights.v1 import weights_pb2 as pb
from vime_proto.weights.v1 import weights_pb2_grpc
from vime_trainer.publish import Publisher


class WeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """Answers from a Publisher. Manifests appear here once the engines that were there have them."""

    def __init__(self, run_id: str, publisher: Publisher, part_bytes: int = 4 << 20):
        self._run_id = run_id
        self._publisher = publisher
        self._part_bytes = part_bytes
        self._log = RequestLog()

    async def GetLatestManifest(self, request, context):
        self._check_run(request.run_id)
        return pb.GetLatestManifestResponse(manifest=self._publisher.latest)

    async def WatchManifests(self, request, context):
        self._check_run(request.run_id)
        async for manifest in self._publisher.watch():
            yield pb.WatchManifestsResponse(manifest=manifest)

    async def FetchTensors(self, request, context):
        latest = self._publisher.latest
        if latest is None or latest.update_id != request.update_id:
            newest = repr(latest.update_id) if latest is not None else "none"
            raise StatusError(
                grpc.StatusCode.NOT_FOUND, f"update {request.update_id!r} is not kept; the newest is {newest}"
            )
        sources = {source.source_id: source for source in latest.sources}
        if request.source_id not in sources:
            raise ContractError("source_id", f"unknown {request.source_id!r}; valid: {', '.join(sources)}")
        count = len(sources[request.source_id].chunks)
        wanted = list(request.chunks) or list(range(count))
        for index in wanted:
            if index >= count:
                raise ContractError("chunks", f"{index} is not below {count} (source {request.source_id!r})")
        self._publisher.reader_opened(request.update_id)
        try:
            for index in wanted:
                parts = self._publisher.store.read(request.update_id, request.source_id, index, self._part_bytes)
                for offset, data in parts:
                    yield pb.FetchTensorsResponse(chunk=index, offset=offset, data=data)
        finally:
            self._publisher.reader_closed(request.update_id)

    async def AckApplied(self, request, context):
        async def execute() -> pb.AckAppliedResponse:
            if not request.engine_id:
                raise ContractError("engine_id", "must not be empty")
            self._publisher.acknowledge(request.update_id, request.engine_id)
            return pb.AckAppliedResponse()

        return await self._log.run(request.request_id, request, execute)

    def _check_run(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise StatusError(grpc.StatusCode.NOT_FOUND, f"run {run_id!r} is not trained here; run {self._run_id!r} is")
