"""A stage of nothing but its process: it serves its role's services, unimplemented but for what a test steers.

``python stage.py ROLE --config FILE``. Configuration beyond the launcher's own keys: ``ready_after`` and ``die_after`` (seconds),
``exit_status``, ``steps`` (trainer), ``contract``, ``stubborn`` (ignores SIGTERM), ``child`` (leaves a sleeping child behind).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

from vime_proto.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from vime_proto.channel import open_channel
from vime_proto.process import exit_with_parent, stop_event, write_address_file
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.router.v1 import router_pb2_grpc
from vime_proto.server import AddressInUseError, ServerInfo, ServerOptions, start_server
from vime_proto.trainer.v1 import trainer_pb2, trainer_pb2_grpc

KEYS = {
    "address_file", "exit_with_parent", "server", "run_id", "database", "blobs", "engine_id", "file_root", "worker_id", "output",
    "buffer", "router", "rollout", "engines", "checkpoint", "ready_after", "die_after", "exit_status", "steps", "contract",
    "stubborn", "child", "weights", "once", "prompts", "max_staleness", "import_batches", "metrics_wait_seconds", "seed",
}  # fmt: skip


class Buffer(buffer_pb2_grpc.BufferServiceServicer):
    closed = False

    async def CloseRun(self, request, context):
        self.closed = True
        return buffer_pb2.CloseRunResponse()

    async def GetStats(self, request, context):
        return buffer_pb2.GetStatsResponse(groups_ready=3, closed=self.closed)

    async def LeasePrompts(self, request, context):
        return buffer_pb2.LeasePromptsResponse(outcome=buffer_pb2.LEASE_OUTCOME_EMPTY)


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    def __init__(self, steps: int):
        self.steps, self.done = steps, asyncio.Event()

    async def GetStatus(self, request, context):
        state = trainer_pb2.TRAINER_STATE_FINISHED if self.done.is_set() else trainer_pb2.TRAINER_STATE_TRAINING
        return trainer_pb2.GetStatusResponse(state=state, step=0)

    async def StreamMetrics(self, request, context):
        for step in range(request.from_step, self.steps):
            values = {"reward/mean": step / self.steps, "train_rollout_logprob_abs_diff/mean": 1e-7 * (step + 1)}
            values |= {"staleness/max": 0.0, "seconds/train": 0.2, "seconds/wait": 0.6}
            yield trainer_pb2.StreamMetricsResponse(metrics=trainer_pb2.StepMetrics(step=step + 1, time=1.0, values=values))
            await asyncio.sleep(0.02)
        if not self.steps:
            await asyncio.Event().wait()
        self.done.set()


def services(role: str, config: dict):
    if role == "buffer":
        return [(buffer_pb2_grpc.add_BufferServiceServicer_to_server, Buffer(), "vime.buffer.v1.BufferService")]
    if role == "router":
        add = router_pb2_grpc.add_RouterServiceServicer_to_server
        return [(add, router_pb2_grpc.RouterServiceServicer(), "vime.router.v1.RouterService")]
    if role == "engine":
        add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
        return [(add, rollout_pb2_grpc.RolloutServiceServicer(), "vime.rollout.v1.RolloutService")]
    trainer = Trainer(config.get("steps", 5))
    return [(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, trainer, "vime.trainer.v1.TrainerService")]


def leave_child(mark: str) -> None:
    """A child in a session of its own, as a daemon would be."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", mark], start_new_session=True)


async def main(role: str, config: dict) -> int:
    stop = stop_event()
    if config.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if config.get("child"):
        leave_child(config["child"])
    print(f"devices {os.environ.get('CUDA_VISIBLE_DEVICES', 'any')}", flush=True)
    server = None
    if role != "worker":
        contract = config.get("contract", ["1.0", "1.0"])
        info = ServerInfo(package=f"test-{role}", role=role, run_id=config.get("run_id", ""), contract=tuple(contract))
        offered = services(role, config)
        try:
            server = await start_server(offered, info, ServerOptions(address=config["server"]["address"]))
        except AddressInUseError as error:
            print(f"test-{role}: {error}", file=sys.stderr)
            return 1
        write_address_file(config["address_file"], server.address)
        await asyncio.sleep(config.get("ready_after", 0.0))
        await server.set_serving(True)
    waits = [asyncio.create_task(stop.wait())]
    # "once": dies only in its first life; the file remembers it.
    first = "once" not in config or not Path(config["once"]).exists()
    if "die_after" in config and first:
        waits.append(asyncio.create_task(asyncio.sleep(config["die_after"])))
    if role == "trainer" and config.get("steps", 5):
        waits.append(asyncio.create_task(offered[0][1].done.wait()))
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if "once" in config:
        Path(config["once"]).touch()
    done = role == "trainer" and offered[0][1].done.is_set()
    if done and "buffer" in config:
        async with open_channel(config["buffer"]) as channel:
            await buffer_pb2_grpc.BufferServiceStub(channel).CloseRun(buffer_pb2.CloseRunRequest(), timeout=5)
    if server is not None:
        await server.stop(0.2)
    if stop.is_set() or done:
        return 0
    print(f"test-{role}: gives up on purpose", file=sys.stderr)
    return config.get("exit_status", 3)


if __name__ == "__main__":
    role, options = sys.argv[1], sys.argv[2:]
    values = tomllib.loads(Path(options[options.index("--config") + 1]).read_text())
    unknown = sorted(set(values) - KEYS)
    if unknown:
        print(f"test-{role}: unknown key {unknown[0]!r}", file=sys.stderr)
        raise SystemExit(2)
    if "--print-config" in options:
        print(json.dumps(values, indent=2))
        raise SystemExit(0)
    if values.get("exit_with_parent"):
        exit_with_parent()
    raise SystemExit(asyncio.run(main(role, values)))
