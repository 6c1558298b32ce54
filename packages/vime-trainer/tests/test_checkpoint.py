"""Checkpoints: exact resume, and nothing half done whatever kills the process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from vime_trainer import files
from vime_trainer.checkpoint import (
    CheckpointError,
    CheckpointSettings,
    RunState,
    find_latest,
    list_steps,
    load_checkpoint,
    path_of,
    save_checkpoint,
    start_point,
)
from vime_trainer.optim import Optimizer, OptimizerSettings
from vime_trainer.packed import pack
from vime_trainer.policy import Policy

SETTINGS = OptimizerSettings(
    learning_rate=3e-3, weight_decay=0.1, schedule="cosine", warmup_updates=3, minimum_ratio=0.1
)


def make(folder, dtype="float32"):
    policy = Policy.from_hf(folder, dtype)
    return policy, Optimizer(policy, SETTINGS, total_updates=12)


def train(policy, optimizer, steps):
    """Steps on batches drawn from the global generators, several updates each; returns losses and learning rates."""
    seen = []
    for _ in range(steps):
        lengths = [random.randint(2, 12), int(np.random.randint(2, 12))]
        for _ in range(2):
            batch = pack([torch.randint(0, 61, (length,)) for length in lengths])
            optimizer.zero_grad()
            loss = -policy(batch).logprobs.mean()
            loss.backward()
            seen.append((loss.item(), optimizer.step().learning_rate))
    return seen


def seed_all():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_by_bit(moe_folder, tmp_path, dtype):
    seed_all()
    policy, optimizer = make(moe_folder, dtype)
    first = train(policy, optimizer, 3)
    state = RunState(3, {"run_id": "r", "lineage": 0, "number": 3}, {"epoch": 1, "place": 7}, {"seed": 1})
    path = save_checkpoint(tmp_path, policy, optimizer, state)
    rest = train(policy, optimizer, 3)

    seed_all()
    other, again = make(moe_folder, dtype)
    assert load_checkpoint(path, other, again) == state
    assert train(other, again, 3) == rest
    assert [rate for _, rate in first + rest] == [rate for _, rate in first] + [rate for _, rate in rest]
    assert len({rate for _, rate in first + rest}) > 9
    for mine, theirs in zip(policy.parameters().values(), other.parameters().values(), strict=True):
        assert torch.equal(mine, theirs)
    want, got = optimizer.state_tensors(), again.state_tensors()
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    assert (again.updates, again.skipped) == (12, 0)


def test_a_checkpoint_before_the_first_step_restores(moe_folder, tmp_path):
    policy, optimizer = make(moe_folder)
    path = save_checkpoint(tmp_path, policy, optimizer, RunState(0))
    other, again = make(moe_folder)
    assert load_checkpoint(path, other, again).step == 0
    seed_all()
    want = train(policy, optimizer, 2)
    seed_all()
    assert train(other, again, 2) == want


def test_parameters_that_never_get_a_gradient_restore(moe_folder, tmp_path):
    """Two tokens reach a few experts only; the others have no gradient, but must be there on restore."""
    policy, optimizer = make(moe_folder)
    optimizer.zero_grad()
    policy(pack([[1, 2]])).logprobs.sum().backward()
    optimizer.step()
    path = save_checkpoint(tmp_path, policy, optimizer, RunState(1))
    other, again = make(moe_folder)
    load_checkpoint(path, other, again)
    assert again.state_tensors().keys() == optimizer.state_tensors().keys()


def test_loading_one_model_leaves_another_alone(moe_folder, dense_folder, tmp_path):
    actor, actor_optimizer = make(moe_folder)
    seed_all()
    train(actor, actor_optimizer, 2)
    latest = save_checkpoint(tmp_path / "actor", actor, actor_optimizer, RunState(2))
    reference, reference_optimizer = make(dense_folder)
    old = save_checkpoint(tmp_path / "reference", reference, reference_optimizer, RunState(1))
    fresh, optimizer = make(moe_folder)
    assert load_checkpoint(latest, fresh, optimizer).step == 2
    drawn = torch.get_rng_state()
    assert load_checkpoint(old, Policy.from_hf(dense_folder)).step == 1
    assert optimizer.updates == 4 and torch.equal(torch.get_rng_state(), drawn)


def test_first_start_on_a_missing_or_empty_or_half_written_folder(tmp_path):
    auto, must = CheckpointSettings(), CheckpointSettings(resume="must")
    half = tmp_path / "half"
    (half / f"{files.PARTIAL}step-00000005-ab").mkdir(parents=True)
    (half / "step-00000004").mkdir()
    (half / "step-00000004" / "policy.weights-00000.safetensors").write_bytes(b"cut")
    (tmp_path / "empty").mkdir()
    for root in (tmp_path / "missing", tmp_path / "empty", half):
        assert start_point(root, auto, 10) is None
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            start_point(root, must, 10)


def test_start_points_follow_the_settings(dense_folder, tmp_path):
    policy, optimizer = make(dense_folder)
    for step in (3, 7):
        save_checkpoint(tmp_path, policy, optimizer, RunState(step))
    assert start_point(tmp_path, CheckpointSettings(), 8) == path_of(tmp_path, 7) == find_latest(tmp_path)
    with pytest.raises(CheckpointError, match="never, but .* holds step-00000007"):
        start_point(tmp_path, CheckpointSettings(resume="never"), 8)
    for target in (5, 7):
        with pytest.raises(CheckpointError, match=f"trained 7 steps already, and the run ends after {target}"):
            start_point(tmp_path, CheckpointSettings(), target)


def test_only_the_newest_are_kept(dense_folder, tmp_path):
    policy, optimizer = make(dense_folder)
    (tmp_path / f"{files.PARTIAL}left-behind").mkdir()
    for step in (1, 2, 10, 11):
        save_checkpoint(tmp_path, policy, optimizer, RunState(step), keep=2)
    assert list_steps(tmp_path) == [10, 11]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000010", "step-00000011"]


def test_missing_damaged_and_foreign_checkpoints_are_named(dense_folder, moe_folder, tmp_path):
    policy, optimizer = make(dense_folder)
    with pytest.raises(CheckpointError, match=r"nowhere: no checkpoint"):
        load_checkpoint(tmp_path / "nowhere", policy, optimizer)
    train(policy, optimizer, 1)
    path = save_checkpoint(tmp_path, policy, optimizer, RunState(1))
    with pytest.raises(CheckpointError, match="another model: '.*' is in only one of the two"):
        load_checkpoint(path, Policy.from_hf(moe_folder))
    with pytest.raises(CheckpointError, match=r"is float32 .*, the model needs bfloat16"):
        load_checkpoint(path, Policy.from_hf(dense_folder, dtype="bfloat16"))
    file = path / "policy.optimizer-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"policy\.optimizer-00000\.safetensors: damaged: its checksum"):
        load_checkpoint(path, policy, optimizer)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"policy\.optimizer-00000\.safetensors is missing"):
        load_checkpoint(path, policy, optimizer)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format": 9}))
    with pytest.raises(CheckpointError, match="format 9; this version reads 2"):
        load_checkpoint(path, policy, optimizer)
    (path / "state.json").write_text(json.dumps(state | {"format": 1}))
    with pytest.raises(CheckpointError, match="format 1; this version reads 2"):
        load_checkpoint(path, policy, optimizer)
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json: damaged"):
        load_checkpoint(path, policy, optimizer)


def test_no_file_holds_a_pickle(moe_folder, tmp_path):
    policy, optimizer = make(moe_folder)
    train(policy, optimizer, 1)
    path = save_checkpoint(tmp_path, policy, optimizer, RunState(1))
    assert sorted(file.name for file in path.iterdir()) == [
        "policy.optimizer-00000.safetensors",
        "policy.weights-00000.safetensors",
        "random-00000.safetensors",
        "state.json",
        "tensors.json",
    ]
    for file in path.iterdir():
        head = file.read_bytes()[:9]
        assert head[:1] == b"{" if file.suffix == ".json" else head[8:9] == b"{"


@pytest.mark.parametrize("replacing", [False, True])
def test_a_failure_at_any_file_operation_leaves_a_loadable_folder(dense_folder, tmp_path, monkeypatch, replacing):
    """Every call that reaches the disk fails once, as a kill would end there; what was complete stays loadable."""
    policy, optimizer = make(dense_folder)
    save_checkpoint(tmp_path, policy, optimizer, RunState(1))
    save_checkpoint(tmp_path, policy, optimizer, RunState(2))

    class Killed(BaseException):
        pass

    survived = 0
    for fatal in range(100):
        calls = 0
        with monkeypatch.context() as patch:
            # No cleanup runs in a process that is killed.
            patch.setattr(files.shutil, "rmtree", lambda *args, **kwargs: None)
            for module, name in ((os, "fsync"), (os, "rename"), (os, "mkdir")):
                real = getattr(module, name)

                def dying(*args, real=real, fatal=fatal, **kwargs):
                    nonlocal calls
                    calls += 1
                    if calls == fatal:
                        raise Killed
                    return real(*args, **kwargs)

                patch.setattr(module, name, dying)
            try:
                save_checkpoint(tmp_path, policy, optimizer, RunState(2 if replacing else 3 + fatal))
            except Killed:
                survived += 1
            else:
                if fatal:
                    break
        load_checkpoint(find_latest(tmp_path), policy, optimizer)
    assert survived > 8


KILLED = """
    import os, signal, sys, time
    import torch
    torch.set_num_threads(1)
    from vime_trainer.checkpoint import RunState, find_latest, load_checkpoint, save_checkpoint
    from vime_trainer.optim import Optimizer, OptimizerSettings
    from vime_trainer.policy import Policy

    folder, root, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    policy = Policy.from_hf(folder)
    optimizer = Optimizer(policy, OptimizerSettings())
    save_checkpoint(root, policy, optimizer, RunState(1), keep=2)
    # Kills come anywhere within the time that a few saves take, which is learnt, since machines differ.
    span, before = 0.05, 1
    for number in range(rounds):
        latest = load_checkpoint(find_latest(root), policy, optimizer).step
        span, before = span * (1.3 if latest == before else 0.95), latest
        child = os.fork()
        if child == 0:
            step = latest
            while True:
                step += 1
                save_checkpoint(root, policy, optimizer, RunState(step), keep=2)
        time.sleep(span * (0.05 + ((number * 37) % 100) / 100))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    latest = load_checkpoint(find_latest(root), policy, optimizer).step
    print("reached", latest)
"""


def test_killed_a_hundred_times_while_saving(dense_folder, tmp_path):
    """The kill's moment is what varies, so the sleep is the input of this test, not a wait for readiness."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(dense_folder), str(tmp_path / "c"), "100"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 20
