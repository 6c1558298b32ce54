"""The process ``vime-rollout engine``: load, prove, listen, serve, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

from vime_proto.errors import ContractError, StatusError
from vime_proto.process import exit_with_parent, stop_event, write_address_file
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.server import AddressInUseError, ServerInfo, start_server
from vime_proto.settings import load
from vime_proto.version import policy_version
from vime_rollout import __version__
from vime_rollout.engine import _routes
from vime_rollout.engine._catch_up import CatchUp
from vime_rollout.engine._control_service import ControlServicer
from vime_rollout.engine._engine import Engine
from vime_rollout.engine._generation import Generation
from vime_rollout.engine._model import ModelDescription, describe
from vime_rollout.engine._registration import Registration
from vime_rollout.engine._rollout_service import RolloutServicer
from vime_rollout.engine._settings import EngineSettings
from vime_rollout.engine._types import BackendDeadError, Sampling

_PROG = "vime-rollout engine"


def run(argv: Sequence[str]) -> int:
    """Runs the command; answers its exit status."""
    settings = load(EngineSettings, argv, _PROG)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if settings.exit_with_parent:
        exit_with_parent()
    try:
        # Whatever is wrong with the folder is said before half a minute of loading.
        model = describe(settings.model, settings.dtype, settings.max_model_len)
        _check_capture(settings, model)
        _check_files(settings)
        status = asyncio.run(_serve(settings, model))
    except (ContractError, StatusError, AddressInUseError, BackendDeadError, RuntimeError, OSError) as error:
        print(f"{_PROG}: {error}", file=sys.stderr, flush=True)
        status = 1
    except Exception as error:
        logging.getLogger(__name__).exception("start failed")
        print(f"{_PROG}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        status = 1
    sys.stderr.flush()
    sys.stdout.flush()
    # vLLM leaves threads behind that keep the interpreter from ending.
    os._exit(status)


async def _serve(settings: EngineSettings, model: ModelDescription) -> int:
    from vime_rollout.engine.backend import Backend

    _end_at_once_while_loading()
    backend = await Backend.start(settings, model)
    stopped = stop_event()
    try:
        engine = Engine(settings, model, backend)
        info = ServerInfo(
            package="vime-rollout", role="engine", package_version=__version__, run_id=settings.run_id,
            capabilities=engine.capabilities,
        )  # fmt: skip
        control = ControlServicer(engine)
        server = await start_server(
            [
                (
                    rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
                    RolloutServicer(engine),
                    "vime.rollout.v1.RolloutService",
                ),
                (
                    rollout_pb2_grpc.add_EngineControlServiceServicer_to_server,
                    control,
                    "vime.rollout.v1.EngineControlService",
                ),
            ],
            info,
            settings.server.options(),
        )
        print(f"listening on {server.address}", flush=True)
        if settings.address_file:
            write_address_file(settings.address_file, server.address)
        await prove(engine)
        engine.machine.started(policy_version(settings.run_id, 0, 0))
        engine.changed()
        # Health stays NOT_SERVING meanwhile: a router that knew an earlier life of this engine sends nothing to old weights.
        catch_up = CatchUp(engine, control) if settings.weights else None
        if catch_up:
            await _unless(stopped, catch_up.first())
            catch_up.start()
        await server.set_serving(True)
        registration = Registration(settings, server.address) if settings.router else None
        if registration:
            registration.start()
        dead = await _until_end(stopped, engine)
        if catch_up:
            await catch_up.stop()
        if registration:
            await registration.stop()
        await server.stop(0.5)
        return 1 if dead else 0
    finally:
        backend.stop()


def _end_at_once_while_loading() -> None:
    # Loading blocks the event loop, so that its signal handlers would wait for half a minute.
    def end(*_) -> None:
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


async def prove(engine: Engine) -> None:
    """Asks for one token, so that kernels are compiled, and routes are known to arrive, before anyone relies on them.

    Raises:
        StatusError: no finite log-prob, or no routes although they are to be captured.
    """
    ended = asyncio.Event()
    probe = Generation("start-up", b"", [0, 0], engine.stamp, 1, 0.1, lambda _: ended.set())
    await engine.backend.submit("start-up", probe.prompt, Sampling(max_new_tokens=1), probe.put)
    await ended.wait()
    if probe.error is not None:
        raise probe.error
    if engine.settings.route_capture:
        trace = _routes.trace(probe, engine.model)
        if trace.header.holes:
            raise ContractError("route_capture", f"the engine returned no routes for rows {trace.header.holes}")
        engine.capabilities["route_capture"] = "true"
    await engine.backend.clear_cache()


def _check_capture(settings: EngineSettings, model: ModelDescription) -> None:
    if settings.route_capture and not model.experts:
        raise ContractError("route_capture", f"{model.architecture} in {model.folder} has no routed experts")


def _check_files(settings: EngineSettings) -> None:
    for key in ("router_token_file", "router_tls_ca", "weights_token_file", "weights_tls_ca"):
        name = getattr(settings, key)
        if name is not None and not os.path.isfile(name):
            raise ContractError(key, f"there is no file {name!r}")


async def _unless(stopped: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Does the work, or leaves it when the process is told to stop."""
    task, stop = asyncio.ensure_future(work), asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for one in (task, stop):
            one.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


async def _until_end(stopped: asyncio.Event, engine: Engine) -> bool:
    """Waits for a signal or the end of the backend; whether it was the latter."""
    while not stopped.is_set():
        if not engine.backend.alive:
            print(f"{_PROG}: vLLM's engine core has ended; the engine cannot go on", file=sys.stderr, flush=True)
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.25):
                await stopped.wait()
    return False
