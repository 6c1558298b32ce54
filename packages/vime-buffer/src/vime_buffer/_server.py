"""The buffer as a server: started, and stopped without leaving anything half done."""

from __future__ import annotations

import asyncio

import vime_buffer
from vime_buffer._metrics import MetricsServer
from vime_buffer._service import BufferServicer, Core
from vime_buffer._service.housekeeping import keep_house, recover
from vime_buffer.settings import BufferSettings
from vime_proto.buffer.v1 import buffer_pb2
from vime_proto.buffer.v1.buffer_pb2_grpc import add_BufferServiceServicer_to_server
from vime_proto.server import ServerInfo, start_server

_SERVICE = buffer_pb2.DESCRIPTOR.services_by_name["BufferService"].full_name


class BufferServer:
    """A running buffer. Use ``await BufferServer.start(settings)``, then ``await server.stop()``."""

    def __init__(self, core: Core):
        self.core = core
        self.metrics: MetricsServer | None = None
        self._running = None
        self._house: asyncio.Task | None = None

    @classmethod
    async def start(cls, settings: BufferSettings, clock=None) -> BufferServer:
        """Opens the store, listens, and answers once health is SERVING.

        Raises:
            ContractError: a setting that cannot be used.
            AddressInUseError: the address is taken.
            DatabaseInUseError: another process has the database open.
            OSError: the metrics port is taken.
        """
        core = Core(settings, clock)
        server = cls(core)
        try:
            recover(core)
            core.attach()
            if settings.metrics_port is not None:
                server.metrics = MetricsServer(core.database, settings.metrics_port)
            server._running = await start_server(
                [(add_BufferServiceServicer_to_server, BufferServicer(core), _SERVICE)],
                ServerInfo("vime-buffer", "buffer", vime_buffer.__version__),
                settings.server.options(),
            )
            server._house = asyncio.create_task(keep_house(core))
            await server._running.set_serving(True)
        except BaseException:
            await server.stop(0)
            raise
        return server

    @property
    def address(self) -> str:
        """host:port that it listens on."""
        return self._running.address

    async def wait(self) -> None:
        """Returns never; raises what housekeeping raises, so that the process ends rather than let leases rest for ever."""
        await asyncio.shield(self._house)

    async def stop(self, grace: float = 1.0) -> None:
        """Answers open long polls, finishes queued transactions and lets everything go."""
        self.core.stop_waiting()
        if self._running is not None:
            await self._running.stop(grace)
        await self.core.settle()
        if self._house is not None:
            await asyncio.gather(self._house, return_exceptions=True)
        if self.metrics is not None:
            self.metrics.stop()
        await asyncio.to_thread(self.core.close)
