"""TrainerService: status, metrics, checkpoint, stop."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from vime_proto.errors import StatusError
from vime_proto.idempotency import RequestLog
from vime_proto.trainer.v1 import trainer_pb2 as pb
from vime_proto.trainer.v1 import trainer_pb2_grpc

from ._status import RunStatus


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers from a RunStatus."""

    def __init__(self, status: RunStatus):
        self._status = status
        self._log = RequestLog()

    async def GetStatus(self, request, context):
        return self._status.snapshot()

    async def StreamMetrics(self, request, context):
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def listener() -> None:
            # The loop may be gone when the training thread reports its end.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(changed.set)

        unsubscribe = self._status.subscribe(listener)
        position = 0 if request.HasField("from_step") else self._status.recorded
        try:
            while True:
                changed.clear()
                finished = self._status.finished
                metrics, position = self._status.metrics_since(position)
                for one in metrics:
                    if not request.HasField("from_step") or one.step >= request.from_step:
                        yield pb.StreamMetricsResponse(metrics=one)
                if finished:
                    self._status.mark_read()
                    return
                await changed.wait()
        finally:
            unsubscribe()

    async def SaveCheckpoint(self, request, context):
        async def execute() -> pb.SaveCheckpointResponse:
            if self._status.finished:
                raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, "the run has ended; no checkpoint can be made")
            waiting = self._status.request_checkpoint()
            path, batch = await asyncio.wrap_future(waiting.done)
            return pb.SaveCheckpointResponse(path=str(path), batch=batch)

        return await self._log.run(request.request_id, request, execute)

    async def Stop(self, request, context):
        async def execute() -> pb.StopResponse:
            return pb.StopResponse(after_step=self._status.request_stop(request.reason))

        return await self._log.run(request.request_id, request, execute)
