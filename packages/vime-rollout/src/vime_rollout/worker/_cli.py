"""The command ``vime-rollout worker``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio

from vime_proto.channel import call, open_channel
from vime_proto.errors import ContractError, describe
from vime_proto.process import exit_with_parent, stop_event
from vime_proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from vime_proto.settings import load
from vime_rollout.rewards import RewardPool, find_spec, read_specs
from vime_rollout.rewards._registry import import_path
from vime_rollout.worker._buffer import BufferClient
from vime_rollout.worker._client import Generator
from vime_rollout.worker._errors import FatalError
from vime_rollout.worker._group import GroupRun
from vime_rollout.worker._prompt import Preparer
from vime_rollout.worker._rollout import RolloutRunner
from vime_rollout.worker._score import Scorer
from vime_rollout.worker._settings import WorkerSettings
from vime_rollout.worker._teacher import Teacher
from vime_rollout.worker._tokenizer import Tokenizer
from vime_rollout.worker._worker import Worker

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a worker; answers the exit status: 0 at the end of the data or when stopped, 1 after a fatal error."""
    settings = load(WorkerSettings, sys.argv[1:] if argv is None else argv, "vime-rollout worker")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if settings.exit_with_parent:
        exit_with_parent()
    try:
        asyncio.run(run_worker(settings))
    except (ContractError, FatalError, OSError) as error:
        print(f"vime-rollout worker: {error}", file=sys.stderr)
        return 1
    return 0


async def run_worker(settings: WorkerSettings, stop: asyncio.Event | None = None) -> dict[str, int]:
    """Runs a worker in this event loop; answers its counters.

    Args:
        settings: its configuration.
        stop: ends it; None stands for SIGINT and SIGTERM.

    Raises:
        ContractError: a configuration that cannot be right.
        FatalError: the buffer or the engines are missing for too long.
    """
    stop = stop_event() if stop is None else stop
    tokenizer = Tokenizer(settings.tokenizer, settings.chat_template_kwargs)
    specs = read_specs(settings.rewards)
    default = find_spec(specs, settings.reward)
    factory = None
    if settings.environment:
        factory = functools.partial(import_path(settings.environment, "environment"), **settings.environment_options)
    preload = [spec for spec in specs.values() if ":" in spec.function]
    preload += [] if default.inline or default in preload else [default]
    pool = RewardPool(settings.reward_workers, settings.reward_timeout_seconds, settings.reward_memory_mib, preload)
    scorer = Scorer(specs, settings.reward, pool, tokenizer)
    token = Path(settings.token_file).read_text().strip() if settings.token_file else None
    async with contextlib.AsyncExitStack() as stack:
        to_buffer = await stack.enter_async_context(open_channel(settings.buffer, token, settings.tls_ca))
        to_rollout = await stack.enter_async_context(open_channel(settings.rollout, token, settings.tls_ca))
        teacher = await _teacher(settings, stack)
        started = asyncio.create_task(_start(settings, pool if preload else None, to_rollout, teacher))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({started, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                return {}
            info = started.result()
            log.info("worker %s: run %s, model %s", settings.worker_id, settings.run_id, info.model or "unknown")
            generator = Generator(to_rollout, info.max_model_len or None, settings.generate_retry_seconds)
            runner = RolloutRunner(generator, tokenizer, factory, settings.max_turns, settings.route_capture, teacher)
            prepare = Preparer(
                tokenizer,
                settings.sampling.message(),
                settings.seed,
                settings.add_special_tokens,
                info.vocab_size or None,
                info.max_model_len or None,
                settings.seeded_requests,
            )
            buffer = BufferClient(
                to_buffer,
                settings.run_id,
                settings.worker_id,
                settings.connect_seconds,
                settings.inline_routing_mib << 20,
            )
            worker = Worker(
                buffer,
                lambda lease: GroupRun(lease, prepare, runner, scorer, resumable=factory is None),
                settings.max_groups_in_flight,
                settings.lease_wait_seconds,
            )
            began = time.monotonic()
            await worker.run(stop)
            counters = {
                **worker.counters,
                "requests_retried": generator.retries,
                "requests_continued": generator.continuations,
            }
            log.info("worker %s ended after %.1f s: %s", settings.worker_id, time.monotonic() - began, counters)
            return counters
        finally:
            for task in (started, stopping):
                task.cancel()
            await asyncio.gather(started, stopping, return_exceptions=True)
            await pool.stop()


async def _teacher(settings: WorkerSettings, stack: contextlib.AsyncExitStack) -> Teacher | None:
    if settings.teacher is None:
        return None
    token = Path(settings.teacher_token_file).read_text().strip() if settings.teacher_token_file else None
    channel = await stack.enter_async_context(open_channel(settings.teacher, token, settings.tls_ca))
    return Teacher(channel, settings.teacher_temperature, settings.teacher_retry_seconds)


async def _start(
    settings: WorkerSettings, pool: RewardPool | None, channel: grpc.aio.Channel, teacher: Teacher | None
) -> rollout_pb2.GetModelInfoResponse:
    if pool is not None:
        await pool.start()
    request = rollout_pb2.GetModelInfoRequest()
    try:
        info = await call(
            rollout_pb2_grpc.RolloutServiceStub(channel).GetModelInfo,
            request,
            timeout=30.0,
            deadline=settings.connect_seconds,
        )
    except grpc.aio.AioRpcError as error:
        raise FatalError(f"no model at {settings.rollout}: {describe(error)}") from error
    if teacher is not None:
        await teacher.check(info.vocab_size, settings.connect_seconds)
    return info
