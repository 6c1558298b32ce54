"""The chunks of one LoadChunks call: while the backend loads one, the next is checked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from vime_proto.weights.v1 import weights_pb2 as pb
from vime_rollout.engine._transports import Chunk
from vime_rollout.engine._updates import Update, Updates


class _Opened:
    """A chunk whose check runs. One that cannot be opened says so when it is its turn: those before it are loaded."""

    def __init__(self, update: Update, source_id: str, index: int):
        self._stack = contextlib.ExitStack()
        self._chunk: Chunk | None = None
        self._error: Exception | None = None
        self.check: asyncio.Task | None = None
        try:
            self._chunk = self._stack.enter_context(update.transport.open(update.manifest.update_id, source_id, index))
        except Exception as error:
            self._error = error
        else:
            self.check = asyncio.ensure_future(Updates.check(update, source_id, index, self._chunk))

    @property
    def chunk(self) -> Chunk:
        """The chunk; raises why there is none."""
        if self._error is not None:
            raise self._error
        return self._chunk

    async def close(self) -> None:
        """Nobody waits for the check any longer; its threads may still read, from a mapping that lives as long as they do."""
        if self.check is not None:
            self.check.cancel()
            await asyncio.gather(self.check, return_exceptions=True)
        self._stack.close()


class LoadCall:
    """Loads chunks of a source of the open update. Needs the lock of ``Updates``."""

    def __init__(self, updates: Updates, update: Update, source_id: str):
        self._updates, self._update, self._source_id = updates, update, source_id
        self._ahead: _Opened | None = None

    async def load(self, wanted: Sequence[pb.WeightChunk]) -> int:
        """Loads them in order; answers their bytes.

        Raises:
            StatusError: see ``Updates.load``; NOT_FOUND, when a chunk is not there (yet): those before it are loaded.
        """
        loaded = 0
        try:
            for chunk, after in zip(wanted, [*wanted[1:], None], strict=True):
                await self._one(chunk.index, after.index if after else None)
                loaded += chunk.bytes.length
        finally:
            if self._ahead is not None:
                await self._ahead.close()
        return loaded

    async def _one(self, index: int, after: int | None) -> None:
        update, source_id = self._update, self._source_id
        opened, self._ahead = self._ahead or _Opened(update, source_id, index), None

        def open_next() -> None:
            if after is not None and update.summed[source_id]:
                self._ahead = _Opened(update, source_id, after)

        try:
            await self._updates.load(update, source_id, index, opened.chunk, opened.check, open_next)
        finally:
            await opened.close()
