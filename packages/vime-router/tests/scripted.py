"""An engine that does what a test says; as a process of its own when run: ``python scripted.py ENGINE_ID``."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import grpc
import numpy as np

from vime_proto.errors import StatusError
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.sample.v1 import sample_pb2
from vime_proto.server import ServerInfo, ServerOptions, start_server
from vime_proto.tensor import to_tensor
from vime_proto.version import policy_version


class Engine(rollout_pb2_grpc.RolloutServiceServicer, rollout_pb2_grpc.EngineControlServiceServicer):
    """Streams ``tokens`` messages of one token each.

    Attributes:
        hold: set it to let requests go on; clear it to let them wait before token ``hold_at``.
        error: raised before the first token.
        status_delay: seconds before GetStatus answers.
        pace: seconds before each token.
        seen: ids of requests that came, with metadata.
        raw: Generate messages as they came, unknown fields included.
        cancelled: ids of requests whose caller went away.
        aborted: ids that Abort was asked for.
    """

    def __init__(self, engine_id: str = "a", tokens: int = 3):
        self.engine_id, self.tokens = engine_id, tokens
        self.state = pb.ENGINE_STATE_SERVING
        self.version = policy_version("run", 0, 1)
        self.reason = ""
        self.hold, self.hold_at = asyncio.Event(), 0
        self.hold.set()
        self.error: Exception | None = None
        self.status_delay = self.pace = 0.0
        self.seen: list[tuple[str, dict]] = []
        self.cancelled: list[str] = []
        self.aborted: list[str] = []
        self.raw: list[bytes] = []

    async def Generate(self, request, context):
        self.seen.append((request.request_id, dict(context.invocation_metadata())))
        self.raw.append(request.SerializeToString())
        if self.error is not None:
            raise self.error
        if self.state in (pb.ENGINE_STATE_ASLEEP, pb.ENGINE_STATE_STALE):
            raise StatusError(grpc.StatusCode.UNAVAILABLE, "asleep or stale")
        try:
            for number in range(self.tokens):
                if number == self.hold_at:
                    await self.hold.wait()
                await asyncio.sleep(self.pace)
                last = number == self.tokens - 1
                yield pb.GenerateResponse(
                    request_id=request.request_id,
                    token_ids=to_tensor(np.array([number], dtype=np.int32)),
                    engine_id=self.engine_id,
                    version=self.version,
                    finish_reason=sample_pb2.FINISH_REASON_LENGTH if last else 0,
                )
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise

    async def Score(self, request, context):
        self.seen.append((request.request_id, dict(context.invocation_metadata())))
        await self.hold.wait()
        if self.error is not None:
            raise self.error
        return pb.ScoreResponse(engine_id=self.engine_id, version=self.version)

    async def Abort(self, request, context):
        self.aborted.extend(request.request_ids)
        return pb.AbortResponse(aborted=request.request_ids)

    async def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(model=f"model of {self.engine_id}", vocab_size=32)

    async def GetStatus(self, request, context):
        await asyncio.sleep(self.status_delay)
        status = pb.EngineStatus(engine_id=self.engine_id, state=self.state, reason=self.reason)
        if self.version is not None:
            status.version.CopyFrom(self.version)
        return pb.GetStatusResponse(status=status)


@contextlib.asynccontextmanager
async def serve_engine(engine: Engine, address: str = "127.0.0.1:0", options: ServerOptions | None = None):
    """The engine's server; SERVING while the context lasts."""
    services = [
        (rollout_pb2_grpc.add_RolloutServiceServicer_to_server, engine, "vime.rollout.v1.RolloutService"),
        (rollout_pb2_grpc.add_EngineControlServiceServicer_to_server, engine, "vime.rollout.v1.EngineControlService"),
    ]
    server = await start_server(services, ServerInfo("scripted", "engine"), options or ServerOptions(address=address))
    await server.set_serving(True)
    try:
        yield server
    finally:
        await server.stop(0)


async def main(engine_id: str) -> None:
    engine = Engine(engine_id, tokens=1000)
    engine.hold_at = 2
    engine.hold.clear()
    async with serve_engine(engine) as server:
        print(server.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
