"""Weight updates: one at a time, checked before a byte is loaded, undone or STALE when they fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import grpc

from vime_proto.engine_state import AWAKE_WEIGHTS, SERVING, STALE
from vime_proto.errors import ContractError, StatusError
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.update_state import UpdateReceiver
from vime_proto.version import show
from vime_proto.weights.v1 import weights_pb2 as weights
from vime_rollout.engine._engine import Engine
from vime_rollout.engine._plan import check_finite, check_groups, check_names, plan
from vime_rollout.engine._transports import Chunk, Transport

log = logging.getLogger(__name__)


class Update:
    """The open update."""

    def __init__(self, receiver: UpdateReceiver, transport: Transport, manifest: weights.WeightManifest):
        self.receiver = receiver
        self.transport = transport
        self.manifest = manifest
        self.fills = plan(manifest)
        self.dtypes = {spec.name: spec.dtype for spec in manifest.tensors}
        self.names: list[str] | None = [spec.name for spec in manifest.tensors]  # told to the backend once
        self.progress = asyncio.Event()
        self.timer: asyncio.Task | None = None
        self.came_from: int | None = None  # state before the update


class Updates:
    """Begin, load, commit, abort. ``lock`` is held by every change of the engine's state."""

    def __init__(self, engine: Engine, lock: asyncio.Lock):
        self._engine = engine
        self._lock = lock
        self._open: Update | None = None
        self._committed: pb.CommitUpdateResponse | None = None
        self._committed_manifest: weights.WeightManifest | None = None

    @property
    def open(self) -> Update | None:
        """The open update."""
        return self._open

    def check_begin(self, request: pb.BeginUpdateRequest, transport: Transport) -> Update | None:
        """The update that a request opens; None when it is open, or committed, already. Changes nothing.

        Raises:
            ContractError, StatusError: the manifest does not fit the model or the engine's state.
        """
        manifest = request.manifest
        for known in (self._open.manifest if self._open else None, self._committed_manifest):
            if known is not None and known.update_id == manifest.update_id:
                if known != manifest:
                    raise ContractError("manifest.update_id", f"{manifest.update_id!r} was used with another manifest")
                if known is self._committed_manifest and self._engine.machine.version != manifest.version:
                    continue
                return None
        machine, model = self._engine.machine, self._engine.model
        full = not manifest.HasField("base_version")
        machine.check_begin_update(manifest.update_id, full=full)
        check_names(manifest, model.expected)
        receiver = UpdateReceiver(
            manifest,
            expected=model.expected,
            held=machine.version,
            deadline_seconds=request.deadline_seconds if request.HasField("deadline_seconds") else 600.0,
        )
        if not full:
            check_groups(manifest, model.expected)
        return Update(receiver, transport, manifest)

    async def begin(self, update: Update, came_from: int, busy: int) -> None:
        """PAUSED, AWAKE_WEIGHTS or STALE -> RECEIVING. Refused while ``busy`` requests take steps."""
        engine = self._engine
        engine.machine.begin_update(
            update.manifest.update_id, full=update.receiver.full, busy=busy, return_to=came_from
        )
        self._open, update.came_from = update, came_from
        update.timer = asyncio.ensure_future(self._expire(update))
        engine.changed()
        try:
            async with asyncio.timeout(max(1.0, update.receiver.seconds_left)):
                await engine.backend.begin_update()
        except Exception as error:
            await self.fail(f"the backend did not begin: {error!r}", ended=True)
            raise StatusError(
                grpc.StatusCode.INTERNAL, f"update {update.manifest.update_id!r} did not begin: {error!r}"
            ) from error

    def current(self, update_id: str) -> Update | None:
        """The open update of this id; None when it is committed already.

        Raises:
            StatusError: FAILED_PRECONDITION, another or no update is open.
        """
        if (
            self._open is None
            and self._committed_manifest is not None
            and self._committed_manifest.update_id == update_id
        ):
            return None
        self._engine.machine.check_update(update_id)
        return self._open

    async def load(self, update: Update, source_id: str, index: int, chunk: Chunk) -> None:
        """Checks and loads one chunk. Wrong bytes end the update.

        Raises:
            StatusError: DATA_LOSS (length, checksum, a weight that is not finite), INTERNAL (the backend failed).
        """
        engine, receiver = self._engine, update.receiver
        fills = update.fills[source_id][index]
        about = f"update {update.manifest.update_id!r}, source {source_id!r}, chunk {index}"

        try:
            # Hashing and the search for NaN release the interpreter lock: other calls go on, and they run side by side.
            checks = (
                asyncio.to_thread(receiver.check_chunk, source_id, index, chunk.data),
                asyncio.to_thread(check_finite, chunk.data, fills, update.dtypes),
            )
            for fault in await asyncio.gather(*checks, return_exceptions=True):
                if fault is not None:
                    raise fault
            if fills:
                names, update.names = update.names, None
                engine.machine.first_byte()
                # A backend that hangs must not hold the lock for ever.
                async with asyncio.timeout(max(1.0, receiver.seconds_left)):
                    await engine.backend.load_chunk(chunk.path, [list(fill) for fill in fills], names)
            receiver.chunk_loaded(source_id, index)
        except ContractError:
            raise
        except StatusError as error:
            await self.fail(error.message)
            raise
        except ValueError as error:
            message = f"{about}: {error}"
            await self.fail(message)
            raise StatusError(grpc.StatusCode.DATA_LOSS, message) from None
        except Exception as error:
            hangs = isinstance(error, TimeoutError)
            what = f"{about}: {'not loaded before the deadline' if hangs else error}"
            await self.fail(what, ended=hangs)
            code = grpc.StatusCode.DEADLINE_EXCEEDED if hangs else grpc.StatusCode.INTERNAL
            raise StatusError(code, what) from error
        update.progress.set()

    async def wait_complete(self, update: Update) -> None:
        """Waits, without the lock, until every source is complete or the update ended."""
        while self._open is update and not update.receiver.complete:
            update.progress.clear()
            await update.progress.wait()

    async def commit(self, update: Update, totals: Sequence[weights.SourceTotal], stay_paused: bool) -> None:
        """RECEIVING -> SERVING at the new version. Needs the lock."""
        engine, receiver = self._engine, update.receiver
        update_id = update.manifest.update_id
        try:
            receiver.check_checksums(totals)
            # A cache that is asleep has no memory to overwrite, and wakes with other memory.
            await engine.backend.end_update(clear_cache=engine.poisoned and update.came_from != AWAKE_WEIGHTS)
        except ContractError:
            raise
        except StatusError as error:
            await self.fail(error.message)
            raise
        except Exception as error:
            engine.machine.first_byte()
            await self.fail(f"the backend did not finish: {error}")
            raise StatusError(grpc.StatusCode.INTERNAL, f"update {update_id!r} was not finished: {error}") from error
        engine.poisoned = False
        engine.machine.commit_update(update_id, update.manifest.version, stay_paused=stay_paused)
        self._close(update)
        self._committed_manifest = update.manifest
        self._committed = pb.CommitUpdateResponse(bytes=receiver.bytes_loaded, seconds=receiver.seconds)
        engine.changed()
        chunks = sum(len(source.chunks) for source in update.manifest.sources)
        log.info(
            "update %s committed: %s, %d bytes in %d chunks, %.3f s",
            update_id, show(update.manifest.version), receiver.bytes_loaded, chunks, receiver.seconds,
        )  # fmt: skip
        if engine.machine.state == SERVING:
            await engine.backend.resume()

    def committed(self) -> pb.CommitUpdateResponse:
        """The answer to the last commit, with the status of now."""
        answer = pb.CommitUpdateResponse()
        answer.CopyFrom(self._committed)
        answer.status.CopyFrom(self._engine.status())
        return answer

    async def fail(self, reason: str, ended: bool = False) -> None:
        """Ends the open update: back to where it came from when nothing was loaded, STALE otherwise. Needs the lock.

        ``ended`` says that the backend has no update to end, or would not answer.
        """
        engine, update = self._engine, self._open
        if update is None:
            return
        machine = engine.machine
        if engine.backend.alive and not ended:
            # Leaves the model's modules in order for the next full update, and closes it in the workers.
            try:
                await engine.backend.end_update()
            except Exception as error:
                log.info("ending the failed update: %s", error)
        machine.fail_update(update.manifest.update_id, reason)
        self._close(update)
        log.warning("update %s failed: %s", update.manifest.update_id, reason)
        if machine.state == STALE:
            # Frozen requests cannot go on under weights that nobody trusts.
            await engine.end_requests(one for one in engine.registry.running if one.internal_id is not None)
        engine.changed()
        if machine.state == SERVING and engine.backend.alive:
            await engine.backend.resume()

    def _close(self, update: Update) -> None:
        self._open = None
        update.progress.set()
        if update.timer is not None and update.timer is not asyncio.current_task():
            update.timer.cancel()

    async def _expire(self, update: Update) -> None:
        await asyncio.sleep(update.receiver.seconds_left)
        async with self._lock:
            if self._open is update:
                await self.fail(f"not committed within {update.receiver.seconds:.1f} s")
