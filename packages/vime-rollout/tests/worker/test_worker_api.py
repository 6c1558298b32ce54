from __future__ import annotations

import inspect
import subprocess
import sys

import vime_rollout.rewards
import vime_rollout.worker
from vime_rollout.worker import Environment, SingleTurn


def test_public_names():
    assert vime_rollout.worker.__all__ == [
        "Environment",
        "Message",
        "Observation",
        "Response",
        "SamplingSettings",
        "SingleTurn",
        "Task",
        "Tokenizer",
        "WorkerSettings",
        "main",
        "run_worker",
        "train_once",
    ]
    assert vime_rollout.rewards.__all__ == [
        "RewardError",
        "RewardFunction",
        "RewardInput",
        "RewardPool",
        "RewardSpec",
        "RewardTimeout",
        "Score",
        "exact",
        "find_spec",
        "math",
        "numeric",
        "read_specs",
    ]
    for module in (vime_rollout.worker, vime_rollout.rewards):
        members = [getattr(module, name) for name in module.__all__]
        assert all(one.__doc__ for one in members if inspect.isclass(one) or inspect.isfunction(one))


def test_the_default_environment_is_one():
    assert isinstance(SingleTurn(), Environment)


def test_the_worker_loads_neither_torch_nor_vllm_nor_sympy():
    code = """
import sys
import vime_rollout.cli, vime_rollout.worker, vime_rollout.rewards
heavy = {"torch", "vllm", "transformers", "sympy", "ray", "megatron", "vime_rollout.engine"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
