"""`vime-trainer rl` as a process, with Megatron."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from make import index_of, samples_of
from stages import Stages
from test_megatron import groups_of

from vime_proto.channel import open_sync_channel
from vime_proto.common.v1 import common_pb2, common_pb2_grpc
from vime_proto.fakes import FakeBuffer
from vime_trainer.checkpoint import list_steps
from vime_trainer.policy import Policy
from vime_trainer.rl import write_batch


@pytest.fixture(scope="module")
def batches(moe_folder, tmp_path_factory):
    """Exported batches that a Megatron engine answered."""
    engine = Policy.from_hf(moe_folder)
    engine.attach_replay()
    folder = tmp_path_factory.mktemp("batches")
    groups = groups_of(engine)
    for ordinal in range(4):
        write_batch(folder, index_of(groups, ordinal=ordinal, batch_id=f"b{ordinal}"), samples_of(groups))
    return folder


@contextlib.contextmanager
def command(model, output, *extra):
    """The process; killed when the block ends, if it has not ended itself."""
    words = ["--model", str(model), "--output", str(output), "--r3=replay", "--metrics.tensorboard=false"]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    with subprocess.Popen(
        [sys.executable, "-m", "vime_trainer", "rl", *words, *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def outcome(*args):
    """Exit status, standard output and standard error of a process that ends by itself."""
    with command(*args) as process:
        out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def imported(batches):
    return [f"--import_batches={batches}", "--batch.groups=2", "--batch.group_size=3", "--optimizer.learning_rate=1e-3"]


def test_train_only_from_a_folder_and_on_from_its_checkpoint(moe_folder, batches, tmp_path):
    code, out, err = outcome(moe_folder, tmp_path, *imported(batches), "--max_steps=2")
    assert code == 0, err
    assert re.fullmatch(r"listening on 127\.0\.0\.1:\d+", out.strip())
    assert "vime-trainer rl: finished" in err and "effective" not in out
    assert "samples lag at most 0 optimizer steps" in err
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["train_rollout_logprob_abs_diff/max"] < 1e-5
    assert rows[1]["train_rollout_logprob_abs_diff/max"] > 1e-5  # the same batch, by weights that moved
    assert list_steps(tmp_path / "checkpoints") == [2]
    Policy.from_hf(tmp_path / "final")
    code, _, err = outcome(moe_folder, tmp_path, *imported(batches), "--max_steps=2")
    assert code == 1 and "has trained 2 steps already" in err and "Traceback" not in err
    code, _, err = outcome(moe_folder, tmp_path, *imported(batches), "--max_steps=4", "--checkpoint.resume=must")
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["lineage"]) for row in rows] == [(1, 0), (2, 0), (3, 1), (4, 1)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_while_it_waits(number, dense_folder, tmp_path):
    with Stages(FakeBuffer(source=[]), engines=[]) as stages:
        address = tmp_path / "address"
        words = [
            f"--buffer={stages.addresses['buffer']}",
            f"--router={stages.addresses['router']}",
            f"--address_file={address}",
            "--r3=off",
            f"--weights.root={tmp_path / 'shm'}",
        ]
        with command(dense_folder, tmp_path, *words) as process:
            end = time.monotonic() + 120
            # It waits for engines then.
            while not (tmp_path / "lineages.json").exists():
                assert time.monotonic() < end and process.poll() is None, process.stderr.read()
                time.sleep(0.05)
            with open_sync_channel(address.read_text()) as channel:
                info = common_pb2_grpc.InfoServiceStub(channel).GetInfo(common_pb2.GetInfoRequest(), timeout=10)
            assert (info.package, info.role, info.run_id) == ("vime-trainer", "trainer", "run")
            assert {"vime.trainer.v1.TrainerService", "vime.weights.v1.WeightService"} <= set(info.services)
            before = time.monotonic()
            process.send_signal(number)
            _, err = process.communicate(timeout=30)
            assert process.returncode == 0, err
            assert time.monotonic() - before < 20
            assert "vime-trainer rl: interrupted" in err and not (tmp_path / "shm").exists()


def test_a_port_in_use_and_a_missing_model_are_one_line(moe_folder, batches, tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = outcome(moe_folder, tmp_path, *imported(batches), f"--server.address=127.0.0.1:{port}")
        assert code == 1 and f"127.0.0.1:{port}" in err and "Traceback" not in err
    code, _, err = outcome(tmp_path / "nowhere", tmp_path, *imported(batches))
    assert code == 1 and "nowhere" in err and "Traceback" not in err
