"""Processes that score, each ended and replaced when a reward exceeds its time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

from vime_proto.errors import ContractError
from vime_rollout.rewards._registry import RewardSpec
from vime_rollout.rewards._types import RewardError, RewardInput, RewardTimeout, Score

log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")
_Work = tuple[RewardSpec, RewardInput, "asyncio.Future[Score]"]


@dataclasses.dataclass
class PoolCounters:
    """What happened so far."""

    scored: int = 0
    failed: int = 0
    timed_out: int = 0
    started: int = 0
    run_seconds: float = 0.0


class RewardPool:
    """Scores in ``workers`` processes. Belongs to the event loop that starts it.

    The time limit counts a reward's own run, not its wait for a process. At the limit the process is killed, whatever it does,
    and another takes its place; other rewards are not affected.

    Args:
        workers: number of processes, at least 1.
        timeout_seconds: run time allowed to one reward.
        memory_mib: data memory allowed to a process, in MiB; 0 sets no limit.
        preload: rewards resolved when a process starts, so that a wrong import path is found early.
        start_seconds: time allowed for a process to start and import.
    """

    def __init__(
        self,
        workers: int = 2,
        timeout_seconds: float = 10.0,
        memory_mib: int = 4096,
        preload: Sequence[RewardSpec] = (),
        start_seconds: float = 120.0,
    ):
        if workers < 1:
            raise ContractError("reward_workers", f"must be at least 1, got {workers}")
        self.counters = PoolCounters()
        self._workers = workers
        self._timeout = timeout_seconds
        self._start_seconds = start_seconds
        self._setup = {
            "path": [p or os.getcwd() for p in sys.path],
            "memory_mib": memory_mib,
            "preload": [_table(s) for s in preload],
        }
        self._queue: asyncio.Queue[_Work] = asyncio.Queue()
        self._tasks: list[asyncio.Task] = []
        self._starting = asyncio.Lock()
        self._processes: set[asyncio.subprocess.Process] = set()

    async def start(self) -> None:
        """Starts the processes and waits until all are ready.

        Raises:
            ContractError: a reward that cannot be imported.
        """
        # Scores start the pool when they are the first, and they come in crowds.
        async with self._starting:
            if self._tasks:
                return
            results = await asyncio.gather(*(self._spawn() for _ in range(self._workers)), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    await self.stop()
                    raise result
            self._tasks = [asyncio.create_task(self._serve(process)) for process in results]

    async def stop(self) -> None:
        """Ends all processes; rewards that wait or run raise RewardError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        while not self._queue.empty():
            _, _, future = self._queue.get_nowait()
            if not future.done():
                future.set_exception(RewardError("the reward pool was stopped"))
        await asyncio.gather(*(self._end(process) for process in list(self._processes)))

    async def score(self, spec: RewardSpec, item: RewardInput) -> Score:
        """Scores one response. A caller that is cancelled before the reward began never runs it.

        Raises:
            RewardTimeout: it ran too long.
            RewardError: it raised, answered no finite number, or its process died.
        """
        await self.start()
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((spec, item, future))
        return await future

    async def _serve(self, process: asyncio.subprocess.Process | None) -> None:
        while True:
            spec, item, future = await self._queue.get()
            if future.done():
                continue
            try:
                if process is None:
                    process = await self._spawn()
                score = await self._run(process, spec, item)
            except RewardError as error:
                self.counters.failed += 1
                if isinstance(error, (RewardTimeout, _ProcessDied)):
                    await self._end(process)
                    process = None
                if not future.done():
                    future.set_exception(error)
            except Exception as error:
                # Whatever it is, this task must live: who waits in the queue would wait for ever.
                self.counters.failed += 1
                if process is not None:
                    await self._end(process)
                    process = None
                if not future.done():
                    future.set_exception(RewardError(f"no score from the process: {type(error).__name__}: {error}"))
            except asyncio.CancelledError:
                if not future.done():
                    future.set_exception(RewardError("the reward pool was stopped"))
                raise
            else:
                self.counters.scored += 1
                if not future.done():
                    future.set_result(score)

    async def _run(self, process: asyncio.subprocess.Process, spec: RewardSpec, item: RewardInput) -> Score:
        limit = spec.timeout_seconds or self._timeout
        started = time.monotonic()
        try:
            async with asyncio.timeout(limit):
                await _write(process, {"spec": _table(spec), "item": dataclasses.asdict(item)})
                answer = await _read(process)
        except TimeoutError:
            self.counters.timed_out += 1
            raise RewardTimeout(f"reward {spec.name!r} ran longer than {limit:g} s and was ended") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            # It may only have closed its pipes and live on; one that is ending keeps its status.
            await self._end(process)
            raise _ProcessDied(f"the process of reward {spec.name!r} ended with status {process.returncode}") from None
        finally:
            self.counters.run_seconds += time.monotonic() - started
        if "error" in answer:
            raise RewardError(answer["error"])
        return Score(answer["value"], answer["parts"])

    async def _spawn(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "vime_rollout.rewards._child", stdin=pipe, stdout=pipe,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(self._setup["path"])},
        )  # fmt: skip
        self._processes.add(process)
        self.counters.started += 1
        try:
            async with asyncio.timeout(self._start_seconds):
                await _write(process, self._setup)
                answer = await _read(process)
        except BaseException as error:
            await self._end(process)
            if isinstance(error, (asyncio.IncompleteReadError, ConnectionError)):
                raise OSError(f"a scoring process ended while it started, status {process.returncode}") from None
            raise
        if "error" in answer:
            await self._end(process)
            field, _, text = answer["error"].partition(": ")
            raise ContractError(field, text)
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Not process.kill(): it polls, and then asyncio finds the status already taken and calls it 255.
                os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        # The transport would otherwise be closed by the collector, when its loop may be gone.
        process._transport.close()
        self._processes.discard(process)


class _ProcessDied(RewardError):
    pass


def _table(spec: RewardSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "function": spec.function,
        "options": dict(spec.options),
        "timeout_seconds": spec.timeout_seconds,
    }


async def _write(process: asyncio.subprocess.Process, message: Any) -> None:
    data = json.dumps(message).encode()
    process.stdin.write(_LENGTH.pack(len(data)) + data)
    await process.stdin.drain()


async def _read(process: asyncio.subprocess.Process) -> Any:
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return json.loads(await process.stdout.readexactly(length))
