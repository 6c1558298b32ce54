"""Coordinates a weight update over all engines."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import torch

from vime_proto.channel import open_channel
from vime_proto.checksum import checksum
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import describe
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.router.v1 import router_pb2
from vime_proto.version import show
from vime_proto.weights.v1 import weights_pb2 as pb
from vime_trainer.settings.weights import WeightsSettings

from ._engine import EngineUpdate
from ._fleet import Fleet
from ._quorum import Quorum
from ._retention import Retention
from ._spool import spool
from ._store import ChunkStore, DirectoryStore, MemoryStore

log = logging.getLogger(__name__)

_LET_GO_SECONDS = 2.0


class PublishError(RuntimeError):
    """Fewer engines than needed have the new weights. The version must not be published."""


@dataclass
class PublishReport:
    """What an update took.

    Attributes:
        version: the new version.
        engines: ids of the engines that run it.
        failed: reason by engine id, of those that do not; they must catch up.
        bytes, chunks: sent to each engine.
        spool_seconds: writing the chunks.
        seconds: from the first Begin to the last Commit.
    """

    version: common.PolicyVersion
    engines: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    chunks: int = 0
    spool_seconds: float = 0.0
    seconds: float = 0.0


class Publisher:
    """Spools weights, updates engines in parallel, and keeps the bytes while an engine may need them.

    `spool` may be called from the training thread; everything else belongs to one event loop.

    Args:
        run_id: the run; update ids begin with it.
        fleet: where engines are found.
        settings: the table [weights].
        open_channel: makes a channel to an engine's address.

    Attributes:
        salt: enters every update id, as do the version and the bytes: an update that is sent again, by this or by another
            coordinator of the same lineage, has the ids of the first, and no other update has.
        endpoint: host:port of this trainer's WeightService, for engines that come late; set once it is bound.
        latest: manifest of the newest version that enough engines have; None before the first.
    """

    def __init__(
        self,
        run_id: str,
        fleet: Fleet,
        settings: WeightsSettings,
        open_channel: Callable[[str], grpc.aio.Channel] = open_channel,
    ):
        self._run_id = run_id
        self._fleet = fleet
        self._settings = settings
        self.endpoint = ""
        self.salt = uuid.uuid4().hex[:8]
        self._open_channel = open_channel
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.retention = Retention()
        self.store: ChunkStore = _make_store(run_id, settings)
        self.latest: pb.WeightManifest | None = None
        self._changed = asyncio.Condition()
        self._running: set[asyncio.Task] = set()
        self._transport = self._make_transport()

    def spool(
        self, version: common.PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> tuple[pb.WeightManifest, float]:
        """Writes the chunks of a version; returns the manifest and the seconds it took. See `_spool.spool` for errors."""
        start = time.monotonic()
        name = f"{self._run_id}-{version.lineage}-{version.number}"
        manifest = spool(f"{name}-new", version, tensors, self._settings.chunk_bytes, self.store)
        update_id = f"{name}-{self._digest(manifest)}"
        self.store.rename(manifest.update_id, update_id)
        manifest.update_id = update_id
        self.retention.add(update_id)
        return manifest, time.monotonic() - start

    async def publish(self, manifest: pb.WeightManifest, spool_seconds: float = 0.0) -> PublishReport:
        """Brings `min_engines` engines or more to the manifest's version.

        No engine commits before `min_engines` have loaded everything, so that a failure before leaves every version as it
        was.

        Raises:
            PublishError: after all attempts fewer engines have it; names each engine's failure. `latest` is unchanged.
            TimeoutError: the router lists too few engines.
        """
        source = manifest.sources[0]
        report = PublishReport(manifest.version, spool_seconds=spool_seconds)
        report.bytes, report.chunks = source.total_bytes, len(source.chunks)
        start = time.monotonic()
        task = asyncio.current_task()
        self._running.add(task)
        try:
            for attempt in range(1, self._settings.attempts + 1):
                entries = await self._fleet.at_least(self._settings.min_engines, self._settings.engines_timeout_seconds)
                await self._update(manifest, entries, report, attempt)
                if len(report.engines) >= self._settings.min_engines:
                    break
                log.warning("update %s, attempt %d: %s", manifest.update_id, attempt, _failures(report))
            else:
                raise PublishError(
                    f"version {show(manifest.version)}: {len(report.engines)} of {self._settings.min_engines} engines "
                    f"needed have it after {self._settings.attempts} attempts; {_failures(report)}"
                )
            report.seconds = time.monotonic() - start
            await self._announce(manifest)
        finally:
            self._running.discard(task)
            self._collect()
        return report

    async def watch(self):
        """Yields the newest manifest, then every one that follows; a slow reader skips to the newest."""
        seen: pb.WeightManifest | None = None
        while True:
            async with self._changed:
                while self.latest is seen:
                    await self._changed.wait()
                seen = self.latest
            yield seen

    def acknowledge(self, update_id: str, engine_id: str) -> None:
        """An engine runs an update."""
        self.retention.done(update_id, engine_id)
        self._collect()

    def reader_opened(self, update_id: str) -> None:
        """A late engine starts to read; its bytes stay meanwhile."""
        self.retention.opened(update_id)

    def reader_closed(self, update_id: str) -> None:
        """It has finished."""
        self.retention.closed(update_id)
        self._collect()

    async def close(self) -> None:
        """Closes channels and frees all bytes, once updates that were given up have let go of their engines."""
        if self._running:
            await asyncio.wait(self._running, timeout=_LET_GO_SECONDS)
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        self.store.close()

    async def _update(
        self, manifest: pb.WeightManifest, entries: list[router_pb2.EngineEntry], report: PublishReport, attempt: int
    ) -> None:
        report.failed.clear()
        # Only those that this very update brought there are done: an engine's claim to have the version does not count.
        have = {e.engine_id for e in entries if e.status.version == manifest.version}
        report.engines[:] = [engine_id for engine_id in report.engines if engine_id in have]
        waiting = [e for e in entries if e.engine_id not in report.engines]
        self.retention.sent(manifest.update_id, [e.engine_id for e in waiting])
        updates = [
            EngineUpdate(
                e.engine_id, self._stub(e.address), manifest, self._transport, self.store, self._settings, attempt
            )
            for e in waiting
        ]
        quorum = Quorum(self._settings.min_engines - len(report.engines), len(updates))
        tasks = {asyncio.create_task(self._one(update, quorum)): update.engine_id for update in updates}
        pending = set(tasks)
        try:
            while pending:
                enough = len(report.engines) >= self._settings.min_engines
                timeout = self._settings.straggler_seconds if enough else None
                finished, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    reason = task.result()
                    if reason is None:
                        report.engines.append(tasks[task])
                    else:
                        report.failed[tasks[task]] = reason
                if not finished:
                    break
        finally:
            for task in pending:
                task.cancel()
            for task in pending:
                await asyncio.wait([task])
                report.failed[tasks[task]] = f"not ready {self._settings.straggler_seconds:g} s after the others"
            for engine_id in tasks.values():
                self.retention.done(manifest.update_id, engine_id)

    async def _one(self, update: EngineUpdate, quorum: Quorum) -> str | None:
        """None when the engine has the version, else why not."""
        try:
            try:
                async with asyncio.timeout(self._settings.timeout_seconds):
                    await update.prepare()
            except BaseException:
                quorum.failed()
                raise
            if not await quorum.ready():
                raise PublishError("given up, since too few engines could load the weights")
            await update.commit()
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(update.abort("too slow")))
            raise
        except grpc.RpcError as error:
            return await self._give_up(update, describe(error))
        except TimeoutError:
            return await self._give_up(update, f"not loaded within {self._settings.timeout_seconds:g} s")
        except Exception as error:
            return await self._give_up(update, str(error) or type(error).__name__)
        return None

    async def _give_up(self, update: EngineUpdate, reason: str) -> str:
        await update.abort(reason)
        return reason

    async def _announce(self, manifest: pb.WeightManifest) -> None:
        self.retention.published(manifest.update_id)
        # Engines that were there had the bytes pushed; whoever comes now fetches them here.
        late = pb.WeightManifest()
        late.CopyFrom(manifest)
        for source in late.sources:
            source.endpoint = self.endpoint
        async with self._changed:
            self.latest = late
            self._changed.notify_all()

    def _digest(self, manifest: pb.WeightManifest) -> str:
        parts = [self.salt.encode(), manifest.model_digest.encode()]
        parts += [chunk.checksum.value for source in manifest.sources for chunk in source.chunks]
        return checksum(b"".join(parts)).value.hex()

    def _collect(self) -> None:
        for update_id in self.retention.take_removable():
            self.store.remove(update_id)

    def _stub(self, address: str) -> rollout_pb2_grpc.EngineControlServiceStub:
        if address not in self._channels:
            self._channels[address] = self._open_channel(address)
        return rollout_pb2_grpc.EngineControlServiceStub(self._channels[address])

    def _make_transport(self) -> pb.TransportConfig:
        kind = self._settings.transport
        place = "" if kind == "stream" else str(store_root(self._run_id, self._settings))
        # Equal configurations have equal ids, since an engine refuses an id that it knows with another configuration.
        config = pb.TransportConfig(transport_id=f"{self._run_id}-{kind}-{checksum(place.encode()).value.hex()}")
        if kind == "stream":
            config.stream.SetInParent()
        elif kind == "shm":
            config.shm.root = str(store_root(self._run_id, self._settings))
        else:
            config.file.root_uri = store_root(self._run_id, self._settings).as_uri()
        return config


def store_root(run_id: str, settings: WeightsSettings) -> Path:
    """Folder of the file and shm transports."""
    return settings.root or Path("/dev/shm") / f"vime-{run_id}"


def _make_store(run_id: str, settings: WeightsSettings) -> ChunkStore:
    if settings.transport == "stream":
        return MemoryStore()
    store = DirectoryStore(store_root(run_id, settings))
    # The whole name: another run in this folder may be called as this one and a number.
    store.remove_leftovers(re.compile(rf"{re.escape(run_id)}-\d+-\d+-(new|[0-9a-f]+)"))
    return store


def _failures(report: PublishReport) -> str:
    return "; ".join(f"engine {name}: {why}" for name, why in sorted(report.failed.items())) or "no engine was tried"
