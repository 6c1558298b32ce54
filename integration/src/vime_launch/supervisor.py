"""Brings the processes of a run up in order, watches them, and ends everything when one ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vime_launch import probe
from vime_launch.batches import is_closed, is_over
from vime_launch.hosts import Hosts
from vime_launch.plan import Process, RunFolder, connect, write_config
from vime_launch.recipe import STAGES, Recipe
from vime_proto.channel import open_channel
from vime_proto.errors import describe
from vime_proto.trainer.v1 import trainer_pb2, trainer_pb2_grpc

_TAIL_LINES = 25
_EXTERNAL_CHECK_SECONDS = 1.0
# Checks of a process that runs elsewhere which may fail in a row before the run ends: refused ones, and ones that are merely late.
_EXTERNAL_REFUSALS = 4
_EXTERNAL_DELAYS = 12
# Seconds beyond a stage's own grace within which its guard must have killed it.
_KILL_SECONDS = 2.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended: exit status of the launcher, and one line (with a log's last lines) for people."""

    code: int
    reason: str


def tail(folder: RunFolder, name: str, lines: int = _TAIL_LINES) -> str:
    """The last lines of a process's log, indented; empty when there are none."""
    path = folder.log(name)
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (64 << 10)))
        found = file.read().decode(errors="replace").splitlines()[-lines:]
    return "".join(f"\n  | {line}" for line in found)


class Supervisor:
    """The processes of one run. ``ended`` is decided once, by whichever comes first."""

    def __init__(self, recipe: Recipe, folder: RunFolder, plan: Sequence[Process], hosts: Hosts, say: Callable[[str], None]):
        self._recipe, self._folder, self._plan, self._hosts, self._say = recipe, folder, list(plan), hosts, say
        self._tasks: set[asyncio.Task] = set()
        self._infos: dict[str, Any] = {}
        self._served = {process.name: asyncio.Event() for process in plan}
        self._lives = {process.name: process.stage.restart for process in plan}
        self.ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def end(self, code: int, reason: str) -> None:
        """Decides how the run ends, unless that is decided."""
        if not self.ended.done():
            self.ended.set_result(Outcome(code, reason))

    def spawn(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Runs ``work`` beside the run; an exception in it ends the run instead of being lost."""

        async def guarded() -> None:
            try:
                await work
            except grpc.RpcError as error:
                self.end(1, f"{what}: {describe(error)}")
            except Exception as error:
                self.end(1, f"{what}: {error or type(error).__name__}")

        task = asyncio.create_task(guarded(), name=what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step has not touched its work.
        task.add_done_callback(lambda _: work.close())
        return task

    async def up(self) -> None:
        """Starts the stages, each kind when those before it serve. Their actors are made at once: each takes Ray a second."""
        groups = {kind: [process for process in self._plan if process.kind == kind] for kind in STAGES}
        actors = {kind: asyncio.create_task(self._prepare(group)) for kind, group in groups.items()}
        try:
            for kind, group in groups.items():
                await actors[kind]
                await asyncio.gather(*(self._up(process) for process in group))
        finally:
            for task in actors.values():
                task.cancel()
            await asyncio.gather(*actors.values(), return_exceptions=True)
        self._say("every stage is up")

    async def _prepare(self, group: Sequence[Process]) -> None:
        started = [process for process in group if not process.external]
        if started:
            await self._hosts.prepare(started)

    async def _up(self, process: Process) -> None:
        if process.external:
            await self._meet(process)
            self.spawn(self._watch_external(process), process.name)
            return
        await self._start(process)
        self.spawn(self._watch(process), process.name)
        if process.serves:
            # Set in this life of the process or, where it may be started again, in a later one.
            await self._served[process.name].wait()

    async def _start(self, process: Process) -> None:
        """Starts the process, and looks for its address beside that. A later life listens where an earlier one did."""
        config = connect(process, self._plan, self._hosts.listen_on(process))
        command = write_config(process, config, self._folder)
        pid = await self._hosts.start(process, command, self._folder, self._recipe.stop_seconds)
        self._say(f"{process.name}: started (guard {pid})")
        if process.serves:
            self.spawn(self._find(process), process.name)

    async def _find(self, process: Process) -> None:
        limit = process.stage.start_seconds
        try:
            async with asyncio.timeout(limit):
                address = await self._hosts.address(process, self._folder)
        except TimeoutError:
            raise RuntimeError(
                f"{process.name} does not listen after {limit:g} s ({process.kind}.start_seconds){tail(self._folder, process.name)}"
            ) from None
        if address is None:
            # It ended; its watch says how, or starts it again.
            return
        process.address = address
        await self._meet(process)

    async def _meet(self, process: Process) -> None:
        assert process.address is not None
        try:
            info = await probe.ask(process.address, process.stage.start_seconds)
        except TimeoutError as error:
            raise RuntimeError(f"{process.name} at {process.address}: {error}{tail(self._folder, process.name)}") from None
        probe.check_run(process.name, info, process.kind, self._recipe.name)
        self._infos[process.name] = info
        probe.check_contracts(self._infos)
        self._served[process.name].set()
        self._say(f"{process.name}: {info.package} {info.package_version} serves at {process.address}")

    async def _watch(self, process: Process) -> None:
        while True:
            code = await self._hosts.wait(process)
            if code == 0 and process.kind == "trainer" and await self._run_is_closed():
                self.end(0, "the trainer finished")
                return
            if code == 0 and process.kind == "worker" and await self._no_prompts_left():
                self._say(f"{process.name} is done: there are no more prompts")
                return
            how = "was lost with its Ray actor" if code is None else f"ended with exit status {code}"
            if self._lives[process.name] < 1 or code is None or self.ended.done():
                log = self._folder.log(process.name)
                shown = tail(self._folder, process.name)
                # A stage that ends by itself before the run is over failed it, whatever its status says.
                self.end(code or 1, f"{process.name} {how}; last lines of {_short(log)}:{shown or ' (empty)'}")
                return
            self._lives[process.name] -= 1
            self._say(f"{process.name} {how}; started again ({self._lives[process.name]} restarts left)")
            await self._start(process)

    async def _run_is_closed(self) -> bool:
        """A trainer closes its run when it is done; one that was told to stop ends with 0, too, and does not."""
        address = self._buffer_address()
        if address is None:
            return self._recipe.mode == "train-only"
        try:
            return await is_closed(address, self._recipe.name)
        except grpc.RpcError:
            return False

    async def _no_prompts_left(self) -> bool:
        address = self._buffer_address()
        try:
            return address is not None and await is_over(address, self._recipe.name)
        except grpc.RpcError:
            return False

    def _buffer_address(self) -> str | None:
        return next((one.address for one in self._plan if one.kind == "buffer"), None)

    async def _watch_external(self, process: Process) -> None:
        """Ends the run when a process that runs elsewhere is gone, or, if it is the trainer, done."""
        assert process.address is not None
        refused = late = 0
        state = trainer_pb2.TrainerState
        async with open_channel(process.address) as channel:
            trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
            health = health_pb2_grpc.HealthStub(channel)
            while not self.ended.done():
                try:
                    await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                    if process.kind == "trainer":
                        status = await trainer.GetStatus(trainer_pb2.GetStatusRequest(), timeout=5)
                        if status.state == state.TRAINER_STATE_FINISHED:
                            return self.end(0, "the trainer finished")
                        if status.state == state.TRAINER_STATE_FAILED:
                            return self.end(1, f"the trainer at {process.address} failed: {status.reason}")
                    refused = late = 0
                except grpc.RpcError as error:
                    busy = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                    refused, late = refused + (not busy), late + busy
                    if refused >= _EXTERNAL_REFUSALS or late >= _EXTERNAL_DELAYS:
                        return self.end(1, f"{process.name} at {process.address} is gone: {describe(error)}")
                await asyncio.sleep(_EXTERNAL_CHECK_SECONDS)

    async def down(self) -> None:
        """Ends every process that was started here, all at once; what does not end within its grace is killed."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        stops = [asyncio.create_task(self._hosts.stop(name)) for name in self._hosts.names]
        if stops:
            await asyncio.wait(stops, timeout=self._recipe.stop_seconds + _KILL_SECONDS)
        if tasks:
            await asyncio.wait(tasks, timeout=_KILL_SECONDS)


def _short(path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
