"""The package's surface, and that neither half drags the other or a heavy stack in."""

import subprocess
import sys

import pytest

import vime_rollout
import vime_rollout.engine
from vime_rollout.cli import main


def test_public_names():
    assert vime_rollout.__all__ == ["__version__"]
    assert vime_rollout.engine.__all__ == ["main"]


@pytest.mark.parametrize(
    ("module", "foreign"),
    [
        ("vime_rollout.cli", ["vime_rollout.engine", "vime_rollout.worker", "torch", "vllm"]),
        ("vime_rollout.worker", ["vime_rollout.engine", "torch", "vllm"]),
        ("vime_rollout.engine._command", ["vime_rollout.worker", "vime_rollout.rewards", "torch", "vllm"]),
    ],
)
def test_what_an_import_does_not_bring(module, foreign):
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(foreign) & set(done.stdout.split())


def test_help_printed_configurations_and_refused_ones_load_nothing_heavy(tmp_path):
    worker = ["--run-id", "r", "--worker-id", "w", "--buffer", "127.0.0.1:1", "--rollout", "127.0.0.1:2", "--tokenizer", "t"]
    lines = {
        0: [
            ["engine", "--help"],
            ["worker", "--help"],
            ["engine", "--model", str(tmp_path), "--print-config"],
            ["worker", *worker, "--print-config"],
        ],
        2: [["engine", "--models", "x"], ["worker", *worker, "--rewards", "x"]],
    }
    code = f"""
import sys
from vime_rollout.cli import main
for want, commands in {lines!r}.items():
    for words in commands:
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code
        assert status == want, (words, status)
print([m for m in ("torch", "vllm", "transformers", "math_verify", "ray", "megatron") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def test_commands_are_named(capsys):
    assert main(["--help"]) == 0
    assert "engine" in capsys.readouterr().out
    assert main(["engin"]) == 2
    assert "did you mean 'engine'" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--version"]) == 0
