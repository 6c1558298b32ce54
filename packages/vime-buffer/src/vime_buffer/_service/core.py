"""What every call works with."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from google.protobuf.message import Message

from vime_buffer._claim import claim_files
from vime_buffer._files import BlobFiles
from vime_buffer._loading import load_group_filter
from vime_buffer._rules import LeaseClock
from vime_buffer._service.changes import Changes
from vime_buffer._sources import PromptSource
from vime_buffer._store import requests
from vime_buffer._store.database import Database, Transaction
from vime_buffer.settings import BufferSettings

Response = TypeVar("Response", bound=Message)
_SETTLE_SECONDS = 0.005


class Core:
    """Database, files, prompt source, hooks and the event that wakes long polls.

    Args:
        settings: of the process.
        clock: seconds since the epoch for leases.

    Raises:
        ContractError: a setting that cannot be used; names the key, or file and line.
        DatabaseInUseError: another process has the database open.
    """

    def __init__(self, settings: BufferSettings, clock: Callable[[], float] | None = None):
        self.settings = settings
        self.clock = clock or LeaseClock()
        self.ttl = settings.lease_ttl_seconds
        self.source = settings.open_source()
        self.evaluation_sets: Mapping[str, PromptSource] = {
            name: PromptSource([one.open(f"evaluation.{name}", settings.message_format)])
            for name, one in settings.evaluation.items()
        }
        for one in self.evaluation_sets.values():
            one.check()
        self.filter_name = settings.group_filter
        self.filter = load_group_filter(settings.group_filter)
        self.database = Database(
            settings.database,
            self.clock,
            delete_files=lambda paths: self.files.delete(paths),
            synchronous=settings.synchronous,
        )
        try:
            self.files = BlobFiles(settings.blob_root, self.database.identity, settings.trace_roots)
            claim_files(self.files, self.database)
        except BaseException:
            self.database.close()
            raise
        self.changes = Changes()
        self.stopping = False
        # Validation, hooks and payload files: none of it may hold the event loop or the writer.
        self.workers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="buffer-worker")
        self.reading: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        # Wakes the housekeeper when something earlier than it knows of is due.
        self.due = asyncio.Event()
        self._unfinished: set[asyncio.Task] = set()

    def attach(self) -> None:
        """Ties the writer's changes to the running event loop."""
        loop = asyncio.get_running_loop()

        def changed() -> None:
            # The loop may be closing while the writer finishes its queue.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.changes.notify)

        self.database.on_change(changed)

    async def work(self, function, *arguments):
        """Runs a function in a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, function, *arguments)

    def finish(self, work: Coroutine) -> asyncio.Task:
        """Starts work that goes on when its caller is gone, and that ``settle`` waits for. Shield the task to await it."""
        task = asyncio.ensure_future(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return task

    async def settle(self) -> None:
        """Waits for all that ``finish`` started."""
        while self._unfinished:
            await asyncio.wait(set(self._unfinished))

    async def once(
        self,
        request: Message,
        run_id: str,
        response: type[Response],
        operation: Callable[[Transaction], Response],
        digest: bytes | None = None,
        worth_keeping: Callable[[Response], bool] = lambda response: True,
    ) -> Response:
        """Runs ``operation`` once per request id and payload; the answer is kept in the same transaction.

        Args:
            worth_keeping: False for answers that changed nothing, such as "nothing yet": the same request may try again.
        """
        requests.check_request_id(request.request_id)
        method = type(request).DESCRIPTOR.name
        digest = digest or requests.fingerprint(request)

        def apply(tx: Transaction) -> Response:
            first = requests.recall(tx, run_id, method, request.request_id, digest, response)
            if first is not None:
                return first
            answer = operation(tx)
            if worth_keeping(answer):
                requests.remember(tx, run_id, method, request.request_id, digest, answer)
            return answer

        return await self.database.run(apply)

    async def poll(
        self, wait: float, attempt, empty: Callable[[Response], bool], settle: float = _SETTLE_SECONDS
    ) -> Response:
        """Repeats ``attempt(is_last)`` after changes until its answer is not empty or the wait is over.

        Changes come in crowds, such as the commits of a batch: those within ``settle`` seconds get one look.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + wait
        while True:
            seen = self.changes.count
            last = self.stopping or loop.time() >= end
            answer = await attempt(last)
            if last or not empty(answer):
                return answer
            await self.changes.wait(seen, end - loop.time())
            await asyncio.sleep(min(settle, max(0.0, end - loop.time())))

    def stop_waiting(self) -> None:
        """Lets every long poll answer now."""
        self.stopping = True
        self.due.set()
        self.changes.notify()

    def close(self) -> None:
        """Finishes queued work and lets everything go."""
        self.workers.shutdown()
        self.database.close()
        self.source.close()
        for one in self.evaluation_sets.values():
            one.close()
