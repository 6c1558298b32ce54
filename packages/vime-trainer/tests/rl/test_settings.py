"""What `vime-trainer rl` accepts and refuses at its start."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from vime_trainer.rl import RlSettings, main
from vime_trainer.rl._evaluate import due
from vime_trainer.settings.rl import EvaluationSettings

BASE = {"model": "m", "output": "o", "buffer": "h:1", "router": "h:2"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer": None}, "buffer: set exactly one of buffer"),
        ({"import_batches": "x"}, "buffer: set exactly one of buffer"),
        ({"router": None}, "router: needed together with buffer"),
        ({"router": "nohost"}, r"router: .*is not host:port"),
        ({"buffer": "::1:5"}, r"buffer: .*IPv6 hosts in brackets"),
        ({"run_id": "a/b"}, "run_id: 'a/b'"),
        ({"publish_interval": 3, "max_staleness": 1}, "publish_interval: 3 needs max_staleness >= 2"),
        ({"batch": {"group_size": 1}}, "batch.group_size: 1 rollout has no group"),
        ({"algorithm": {"name": "grop"}}, "did you mean 'grpo'"),
        ({"algorithm": {"old_policy": "engine", "correction": "tis"}}, "corrects twice"),
        ({"algorithm": {"correction": "none"}, "max_staleness": 1}, "stale"),
        (
            {"r3": "record", "batch": {"optimizer_steps": 2}, "algorithm": {"old_policy": "engine"}},
            'r3: "record" keeps .* old_policy "engine" makes none',
        ),
        ({"weights": {"transport": "carrier"}}, "weights.transport"),
        ({"learning_rate": 1}, "learning_rate"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValidationError, match=message):
        RlSettings(**{**BASE, **change})


def test_interval_with_enough_staleness_is_accepted():
    RlSettings(**BASE, publish_interval=5, max_staleness=4)
    RlSettings(**{**BASE, "buffer": "[::1]:5"})


def test_the_effective_lag_counts_optimizer_steps():
    lag = RlSettings(**BASE, max_staleness=1, batch={"optimizer_steps": 4}).effective_lag()
    assert "at most 4 optimizer steps behind" in lag and "7 at its last" in lag


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--algorithm.clip_hihg", "0.3"], "algorithm.clip_hihg: unknown key 'clip_hihg'; did you mean 'clip_high'"),
        (["--max_step", "3"], "unknown key 'max_step'; did you mean 'max_steps'"),
        (["--weights.transprot", "shm"], "did you mean 'transport'"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(argv, message, capsys):
    with pytest.raises(SystemExit) as error:
        main([*(f"--{key}={value}" for key, value in BASE.items()), *argv])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_evaluations_are_due():
    every = EvaluationSettings(set="s", interval=3)
    assert [step for step in range(8) if due(every, step, False, False)] == [0, 3, 6]
    assert due(every, 7, True, False) and due(every, 7, False, True)
    never = EvaluationSettings(set="s", at_start=False, at_end=False)
    assert not any(due(never, step, first, last) for step in range(5) for first, last in ((0, 0), (1, 0), (0, 1)))


def test_the_package_imports_without_torch():
    code = "import sys, vime_trainer; assert not {'torch', 'megatron', 'vllm', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
