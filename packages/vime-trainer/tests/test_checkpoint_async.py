"""Checkpoints that are written beside training."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_fakes import Cut, local_part, make, on_ranks, whole_model

from vime_trainer.checkpoint import CheckpointError, RunState, Saver, list_steps, load_models
from vime_trainer.checkpoint import _commit as commit_module

TIMEOUT = 30


@pytest.fixture
def gate(monkeypatch):
    """Holds back the writing of files while it is closed; `gate.failure` is raised instead of writing."""
    real, gate = commit_module.write_tensors, threading.Event()
    gate.failure = None
    gate.set()

    def write(path, tensors):
        assert gate.wait(TIMEOUT)
        if gate.failure is not None:
            raise gate.failure
        return real(path, tensors)

    monkeypatch.setattr(commit_module, "write_tensors", write)
    return gate


def overwrite(trained):
    with torch.no_grad():
        for param in trained.policy.params.values():
            param.fill_(7.0)
        for state in trained.optimizer.state.values():
            state["exp_avg"].fill_(7.0)


def test_training_goes_on_while_the_state_of_the_call_is_written(tmp_path, gate):
    whole = whole_model(1)
    trained, saver = make(whole, Cut(), 0), Saver(tmp_path, asynchronous=True)
    gate.clear()
    saved = saver.save({"policy": trained}, RunState(1))
    overwrite(trained)
    saver.check()
    assert not saved.done() and list_steps(tmp_path) == []
    gate.set()
    saver.wait()
    assert saved.done() and list_steps(tmp_path) == [1] and saved.result().name == "step-00000001"
    fresh = make(whole, Cut(), 0, filled=False)
    load_models(saved.result(), {"policy": fresh})
    for name, param in fresh.policy.params.items():
        assert torch.equal(param, whole["weights"][name])
        assert torch.equal(fresh.optimizer.state[param]["exp_avg"], whole["exp_avg"][name])


def test_a_process_that_ends_finishes_what_is_nearly_written(tmp_path):
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from checkpoint_fakes import Cut, make, whole_model
from vime_trainer.checkpoint import RunState, Saver, _commit
write = _commit.write_tensors
_commit.write_tensors = lambda *arguments: time.sleep(0.3) or write(*arguments)
Saver({str(tmp_path)!r}, asynchronous=True).save({{"policy": make(whole_model(1), Cut(), 0)}}, RunState(1))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)
    assert list_steps(tmp_path) == [1]


def test_a_process_that_ends_gives_up_what_takes_too_long_and_says_so(tmp_path):
    script = f"""
import sys, threading
sys.path.insert(0, {str(Path(__file__).parent)!r})
from checkpoint_fakes import Cut, make, whole_model
from vime_trainer import leaving
from vime_trainer.checkpoint import RunState, Saver, _commit
leaving._SECONDS = 0.1
writing = threading.Event()
_commit.write_tensors = lambda *arguments: writing.set() or threading.Event().wait()
saver = Saver({str(tmp_path)!r}, asynchronous=True)
saver.save({{"policy": make(whole_model(1), Cut(), 0)}}, RunState(7))
assert writing.wait(30)
leaving.leave(5)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], check=False, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 5 and list_steps(tmp_path) == []
    assert done.stderr == (
        "vime-trainer: the checkpoint of step 7 was given up, nothing of it is visible; the one before it stays\n"
    )


def test_the_next_save_waits_and_one_copy_is_held(tmp_path, gate):
    trained, saver = make(whole_model(2), Cut(), 0), Saver(tmp_path, keep=1, asynchronous=True)
    gate.clear()
    first = saver.save({"policy": trained}, RunState(1))
    started = threading.Event()

    def second():
        started.set()
        saver.save({"policy": trained}, RunState(2))

    thread = threading.Thread(target=second)
    thread.start()
    assert started.wait(TIMEOUT) and not first.done()
    gate.set()
    thread.join(TIMEOUT)
    assert first.done()
    saver.wait()
    assert list_steps(tmp_path) == [2]
    params = sum(param.numel() for param in trained.policy.params.values())
    counts = len(trained.policy.params)
    random = torch.get_rng_state().numel() + 8 * (624 + 625)
    assert saver.host_bytes == 4 * (3 * params + counts) + random


def test_a_failure_is_raised_at_the_next_step_and_the_earlier_checkpoint_stays(tmp_path, gate, caplog):
    whole = whole_model(3)
    trained, saver = make(whole, Cut(), 0), Saver(tmp_path, asynchronous=True)
    saver.save({"policy": trained}, RunState(1))
    saver.wait()
    gate.failure = OSError(28, "No space left on device")
    saved = saver.save({"policy": trained}, RunState(2))
    assert isinstance(saved.exception(TIMEOUT), CheckpointError)
    # Said even where nobody asks for the outcome any more.
    assert "the checkpoint of step 2 failed" in caplog.text and "No space left on device" in caplog.text
    with pytest.raises(CheckpointError, match="No space left on device"):
        saver.check()
    saver.check()
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
    gate.failure = None
    saver.save({"policy": trained}, RunState(3))
    saver.wait()
    assert list_steps(tmp_path) == [1, 3]


def test_ranks_that_write_at_different_speed_become_visible_together(tmp_path, monkeypatch):
    whole, shape, slow = whole_model(4), Cut(data=2, distributed=True), threading.Event()
    real = commit_module.write_tensors

    def write(path, tensors):
        assert not path.name.endswith("-00001.safetensors") or slow.wait(TIMEOUT)
        return real(path, tensors)

    monkeypatch.setattr(commit_module, "write_tensors", write)

    def run(rank, ranks):
        saver = Saver(tmp_path, ranks=ranks, asynchronous=True)
        saved = saver.save({"policy": make(whole, shape, rank)}, RunState(1))
        if rank == 1:
            assert list_steps(tmp_path) == []
            slow.set()
        saver.wait()
        return saved.result()

    assert on_ranks(2, run) == [tmp_path / "step-00000001"] * 2
    trained = make(whole, Cut(), 0, filled=False)
    load_models(tmp_path / "step-00000001", {"policy": trained})
    assert all(torch.equal(p, local_part(n, whole["weights"][n], Cut(), 0)) for n, p in trained.policy.params.items())
