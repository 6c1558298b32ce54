"""Puts a run together, and takes it apart again whatever happens."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from vime_proto.errors import ContractError
from vime_proto.process import write_address_file
from vime_proto.trainer.v1 import trainer_pb2 as trainer
from vime_trainer import megatron
from vime_trainer.checkpoint import CheckpointError, RunState, start_point
from vime_trainer.files import write_text
from vime_trainer.metrics import PrometheusWriter, Writer, open_writers
from vime_trainer.profiler import Profiler
from vime_trainer.publish import Fleet, Publisher
from vime_trainer.ranks import world_size
from vime_trainer.service import RunStatus, reachable_address, serve_trainer
from vime_trainer.settings.rl import RlSettings

from ._backend import Backend
from ._batches import FolderSource, SampleSource
from ._buffer import BufferClient
from ._follow import Leader, follow
from ._io import Interrupted, IoThread
from ._lineage import LineageRecord, open_lineage
from ._loop import Loop, shared_settings
from ._peers import check_peer
from ._reference import ReferenceRefresh
from ._step import BatchStep
from ._team import Team
from ._updates import Updates

log = logging.getLogger(__name__)

_CLEAN_UP_SECONDS = 5.0


def train(
    settings: RlSettings,
    backend: Callable[[RlSettings], Backend],
    interrupt: threading.Event | None = None,
    traced: threading.Event | None = None,
) -> str:
    """Runs `vime-trainer rl` to its end; "finished" or "stopped".

    With RANK and WORLD_SIZE in the environment, as torchrun sets them, all ranks call it: the first one leads.

    Args:
        settings: the configuration.
        backend: makes this rank's part of the model.
        interrupt: ends the run soon after it is set.
        traced: the next step is traced once it is set.

    Raises:
        Interrupted: it was set; nothing is lost, as the batch at hand was not acked.
        CheckpointError, ContractError, PublishError, OSError, grpc.RpcError: what went wrong, in one line.
        RankLostError: another rank failed, or is gone.
    """
    interrupt = interrupt or threading.Event()
    with contextlib.ExitStack() as stack:
        team = _team(settings, interrupt)
        io = IoThread(interrupt)
        stack.callback(io.close)
        if not team.is_leader:
            return follow(settings, backend, lambda: _samples(settings, io, stack), team)
        status = RunStatus(settings.max_steps)
        team.begin()
        io.idle = team.idle
        try:
            reason = _train(settings, backend, status, io, stack, team, traced)
        except BaseException as error:
            status.set(trainer.TRAINER_STATE_FAILED, reason=str(error))
            _dismiss(status)
            team.end(str(error), failed=not isinstance(error, Interrupted))
            raise
        team.end(reason, failed=False)
        status.set(trainer.TRAINER_STATE_FINISHED, reason=reason)
        _dismiss(status)
        # A run can be over before whoever waited for its address has come for its metrics.
        status.wait_read(settings.metrics_wait_seconds, interrupt)
        return reason


def _dismiss(status: RunStatus) -> None:
    """Tells those who wait for a checkpoint that none will come."""
    for request in status.take_checkpoint_requests():
        request.done.set_exception(RuntimeError("the run ended before the checkpoint was written"))


def _team(settings: RlSettings, interrupt: threading.Event) -> Team:
    settings.parallel.check_world(world_size())
    if world_size() == 1:
        return Team(interrupt=interrupt)
    return Team(megatron.initialize(settings.parallel), interrupt)


def _samples(settings: RlSettings, io: IoThread, stack: contextlib.ExitStack) -> SampleSource:
    """Where a rank that does not lead fetches its samples."""
    if settings.import_batches is not None:
        return FolderSource(settings.import_batches)
    return BufferClient(settings, io, io.run(_open(settings, "buffer", io, stack)), uuid.uuid4().hex[:12])


def _train(
    settings: RlSettings,
    make_backend: Callable[[RlSettings], Backend],
    status: RunStatus,
    io: IoThread,
    stack: contextlib.ExitStack,
    team: Team,
    traced: threading.Event | None,
) -> str:
    root = settings.output / "checkpoints"
    # Before anything is loaded: what cannot be done is refused at once.
    path = start_point(root, settings.checkpoint, settings.max_steps)
    settings.output.mkdir(parents=True, exist_ok=True)
    for role in ("buffer", "router"):
        if getattr(settings, role) is not None:
            patience = settings.buffer_retry_seconds
            io.run(check_peer(role, getattr(settings, role), settings.run_id, patience, settings.client.open))
    publisher, fleet = _publisher(settings, io, stack)
    server = io.run(_serve(settings, status, publisher, io, stack))
    if publisher is not None:
        publisher.endpoint = reachable_address(server.address)
    if settings.address_file is not None:
        write_address_file(settings.address_file, server.address)
    print(f"listening on {server.address}", flush=True)
    log.info(settings.effective_lag())
    with team.together("load"), team.settled():
        backend = make_backend(settings)
    restored = _restore(settings, Leader(team, backend), path)
    trained = restored.step if restored is not None else 0
    lineage = _lineage(settings, restored)
    if publisher is not None:
        publisher.salt = lineage.salt
    write_text(settings.output / "trainer.json", settings.model_dump_json(indent=2) + "\n")
    writers = _writers(settings, lineage, stack)
    if settings.import_batches is not None:
        source, buffer, updates = FolderSource(settings.import_batches, trained), None, None
    else:
        channel = io.run(_open(settings, "buffer", io, stack))
        source = buffer = BufferClient(settings, io, channel, uuid.uuid4().hex[:12])
        stack.callback(buffer.close)
        _open_run(buffer, lineage, trained)
        updates = Updates(publisher, fleet, io, settings.max_staleness, trained)
    status.set(checkpoint=trained if restored is not None else None)
    leader = Leader(team, backend, BatchStep(settings, backend, source, team, team.pause))
    reference = _reference(settings, leader, restored)
    profiler = Profiler(settings.profiler, settings.output, team.rank, traced)
    loop = Loop(settings, leader, source, status, writers, io, lineage, trained, updates, buffer, reference, profiler)
    io.run(server.set_serving(True))
    reason = loop.run()
    if settings.export_model:
        leader.export(settings.output / "final")
    if buffer is not None:
        buffer.close_run(reason)
    return reason


async def _serve(settings: RlSettings, status: RunStatus, publisher: Publisher | None, io: IoThread, stack):
    server = await serve_trainer(settings.run_id, status, publisher, settings.server.options())
    stack.callback(lambda: io.finish(server.stop(0.5), _CLEAN_UP_SECONDS))
    return server


async def _open(settings: RlSettings, role: str, io: IoThread, stack: contextlib.ExitStack) -> grpc.aio.Channel:
    channel = settings.client.open(getattr(settings, role))
    stack.callback(lambda: io.finish(channel.close(), _CLEAN_UP_SECONDS))
    return channel


def _publisher(settings: RlSettings, io: IoThread, stack) -> tuple[Publisher | None, Fleet | None]:
    if settings.router is None or settings.import_batches is not None:
        return None, None

    async def make() -> tuple[Publisher, Fleet]:
        fleet = Fleet(await _open(settings, "router", io, stack))
        publisher = Publisher(settings.run_id, fleet, settings.weights, settings.client.open)
        stack.callback(lambda: io.finish(publisher.close(), _CLEAN_UP_SECONDS))
        return publisher, fleet

    return io.run(make())


def _restore(settings: RlSettings, backend: Leader, path: Path | None) -> RunState | None:
    if path is None:
        return None
    state = backend.restore(path)
    for name, value in shared_settings(settings).items():
        if state.run.get(name, value) != value:
            raise CheckpointError(f"{name}: {value!r}, but {path} was written with {state.run[name]!r}")
    log.info("restored %s: %d batches", path, state.step)
    return state


def _reference(settings: RlSettings, backend: Leader, restored: RunState | None) -> ReferenceRefresh:
    batches = 0 if restored is None else int(restored.cursor.get("reference", 0))
    reference = ReferenceRefresh(settings.output / "reference", settings.algorithm.kl, batches)
    if batches and settings.algorithm.kl.coefficient > 0:
        backend.load_reference(reference.folder(batches))
    return reference


def _lineage(settings: RlSettings, restored: RunState | None) -> LineageRecord:
    point = None if restored is None else (int(restored.version["lineage"]), restored.step)
    return open_lineage(settings.output, settings.run_id, point)


def _writers(settings: RlSettings, lineage: LineageRecord, stack) -> list[Writer]:
    writers = open_writers(
        settings.metrics,
        settings.output,
        settings.run_id,
        settings.model_dump(mode="json"),
        {"lineage": lineage.ordinal},
    )
    if settings.metrics_port is not None:
        writers.append(PrometheusWriter(settings.metrics_port))
    for writer in writers:
        stack.callback(writer.close)
    return writers


def _open_run(buffer: BufferClient, lineage: LineageRecord, trained: int) -> None:
    opened = buffer.open_run(lineage.message())
    if lineage.ordinal > 0:
        rewound = buffer.rewind(trained, lineage.message())
        log.info(
            "lineage %d from batch %d: %d batches are ready again, %d groups are asked for again",
            lineage.ordinal,
            trained,
            rewound.batches_restored,
            rewound.groups_expired,
        )
    elif opened.existed:
        # No restore on our side, but the buffer knows the run: its batches belong to weights that are gone.
        raise ContractError(
            "run_id",
            f"the buffer has a run of this id with {opened.trained} trained batches, but the output folder knows nothing "
            "of it; choose another run_id, or the output folder of that run",
        )


@contextlib.contextmanager
def signals_set(event: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set the event; a second one ends the process at once.

    Another rank's signal sets the event too, and this process's own may come after it.
    """
    asked = False

    def handle(number, frame) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = True
        event.set()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
