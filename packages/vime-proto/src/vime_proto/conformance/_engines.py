"""Fake engines for a router under test, served by this process from a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.engine_state import STALE
from vime_proto.fakes import FakeEngine, serve
from vime_proto.server import ServerOptions


class EngineHost:
    """An event loop in a thread, and the engines that it serves."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-engines", daemon=True)
        self._thread.start()
        self._stacks: dict[str, contextlib.AsyncExitStack] = {}
        self._engines: dict[str, FakeEngine] = {}

    def _do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def start(
        self,
        engine_id: str,
        version: common.PolicyVersion | None = None,
        step_seconds: float = 0.002,
        address: str = "127.0.0.1:0",
    ) -> str:
        """Serves an engine; answers its address."""

        async def begin() -> str:
            self._engines[engine_id] = FakeEngine(engine_id, version=version, step_seconds=step_seconds)
            stack = self._stacks[engine_id] = contextlib.AsyncExitStack()
            return (await stack.enter_async_context(serve(self._engines[engine_id], ServerOptions(address)))).address

        return self._do(begin())

    def set_version(self, engine_id: str, version: common.PolicyVersion) -> None:
        """What an update would do, without one."""

        async def change() -> None:
            engine = self._engines[engine_id]
            engine.machine.begin_update("conformance", full=True, busy=0)
            engine.machine.commit_update("conformance", version)
            engine.last_version = version
            async with engine.state_changed:
                engine.state_changed.notify_all()

        self._do(change())

    def make_stale(self, engine_id: str) -> None:
        """Weights that are not to be trusted."""

        async def change() -> None:
            engine = self._engines[engine_id]
            engine.machine.go_stale("made stale by the suite")
            assert engine.machine.state == STALE

        self._do(change())

    def running(self, engine_id: str) -> int:
        """Requests that the engine runs or holds."""
        return len(self._engines[engine_id].generations.open)

    def stop(self, engine_id: str) -> None:
        """The engine is gone."""
        self._engines.pop(engine_id)
        self._do(self._stacks.pop(engine_id).aclose())

    def close(self) -> None:
        """All engines are gone, and the thread ends."""
        for engine_id in list(self._stacks):
            self.stop(engine_id)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
