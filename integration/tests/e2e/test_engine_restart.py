"""An engine that is killed within a run is started again, and the run goes on where it was: nothing is off-policy."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import grpc
from e2e_support import demo_recipe, stage_process, wait_until

from vime_launch import toml
from vime_launch.process_tree import tree
from vime_proto.channel import open_sync_channel
from vime_proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from vime_proto.trainer.v1 import trainer_pb2, trainer_pb2_grpc

STEPS = 6


def waits_for_groups(folder: Path):
    """A condition: the trainer has waited for a second, so that it has nothing left to train on."""
    since: list[float] = []

    def condition() -> bool:
        with open_sync_channel((folder / "addresses/trainer").read_text()) as channel:
            state = trainer_pb2_grpc.TrainerServiceStub(channel).GetStatus(trainer_pb2.GetStatusRequest(), timeout=60).state
        if state != trainer_pb2.TRAINER_STATE_WAITING:
            since.clear()
            return False
        since.append(time.monotonic())
        return since[-1] - since[0] > 1.0

    return condition


def test_a_run_outlives_its_engine(vime, home, prepared):
    recipe = demo_recipe(prepared) | {"name": "mortal", "runs_dir": str(home / "restart")}
    recipe["engine"] |= {"restart": 2}
    # A lease that lapsed would be another story.
    recipe["buffer"]["config"]["lease_ttl_seconds"] = 600
    recipe["trainer"]["config"] |= {
        "max_steps": STEPS,
        "max_staleness": 0,
        "evaluations": [],
        "batch": {"groups": 4, "group_size": 4, "token_budget": 4096},
        # Many small chunks, so that an update lasts long enough to be met.
        "weights": {"transport": "shm", "chunk_bytes": 4096},
    }
    path, folder = home / "restart.toml", home / "restart/mortal"
    path.write_text(toml.dumps(recipe))
    process = vime.start("run", str(path))

    def steps() -> int:
        file = folder / "metrics.jsonl"
        return max((json.loads(line)["step"] for line in file.read_text().splitlines()), default=0) if file.exists() else 0

    def say() -> str:
        return vime.output[-3000:]

    try:
        # The only engine, while the trainer waits for groups of its newest weights: nobody would push those again.
        wait_until(lambda: steps() >= 1, 300, process, say)
        worker = stage_process(folder, "worker-0")
        os.kill(worker, signal.SIGSTOP)
        try:
            wait_until(waits_for_groups(folder), 60, process, say)
            os.kill(stage_process(folder, "engine-0"), signal.SIGKILL)
            log = folder / "logs/engine-0.log"
            wait_until(lambda: "caught up with mortal/0:" in log.read_text(), 300, process, say)
        finally:
            os.kill(worker, signal.SIGCONT)
        before = steps()
        wait_until(lambda: steps() > before, 300, process, say)
        # vLLM's core, in the middle of an update.
        with open_sync_channel((folder / "addresses/engine-0").read_text()) as channel:
            status = rollout_pb2_grpc.EngineControlServiceStub(channel).GetStatus
            (core,) = [
                seen.pid
                for seen in tree(stage_process(folder, "engine-0"))
                if b"EngineCor" in (Path("/proc") / str(seen.pid) / "comm").read_bytes()
            ]
            trainer = stage_process(folder, "trainer")

            def stopped_in_an_update() -> bool:
                """Stops the trainer in an update; one that ends all the same, since it was nearly over, is let go."""
                if not status(rollout_pb2.GetStatusRequest(), timeout=60).status.update_id:
                    return False
                os.kill(trainer, signal.SIGSTOP)
                # The one call on its way is worked off by then.
                until = time.monotonic() + 3
                while status(rollout_pb2.GetStatusRequest(), timeout=60).status.state == rollout_pb2.ENGINE_STATE_RECEIVING:
                    if time.monotonic() > until:
                        return True
                os.kill(trainer, signal.SIGCONT)
                return False

            wait_until(stopped_in_an_update, 300, process, say, pause=0)
            os.kill(core, signal.SIGKILL)
            os.kill(trainer, signal.SIGCONT)
            # Until the engine is gone; how the call that was under way ends then is for gRPC to say.
            patience = time.monotonic() + 120
            with contextlib.suppress(grpc.RpcError):
                while True:
                    assert time.monotonic() < patience, "the engine goes on without its core"
                    found = status(rollout_pb2.GetStatusRequest(), timeout=60).status
                    assert found.state != rollout_pb2.ENGINE_STATE_SERVING, "half an update serves nobody"
        assert process.wait(400) == 0, say()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["staleness_max"] == 0
    assert summary["logprob_abs_diff_max"] < 1e-5
    assert vime.output.count("engine-0 ended with exit status") == 2
