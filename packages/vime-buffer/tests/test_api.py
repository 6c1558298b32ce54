"""What is public, and that a lone import stays light."""

import subprocess
import sys

import vime_buffer
from vime_buffer import hooks


def test_public_names():
    assert vime_buffer.__all__ == [
        "KEEP",
        "BufferServer",
        "BufferSettings",
        "DatabaseInUseError",
        "EvaluationSet",
        "FilterDecision",
        "GroupFilter",
        "MessageFormat",
        "PromptFile",
        "__version__",
        "drop",
    ]
    assert all(hasattr(vime_buffer, name) for name in vime_buffer.__all__)
    assert hooks.__all__ == ["KEEP", "FilterDecision", "GroupFilter", "MessageFormat", "drop"]


def test_no_heavy_stack_comes_in():
    code = (
        "import sys, vime_buffer, vime_buffer.cli; vime_buffer.BufferServer;"
        "print([m for m in ('torch', 'vllm', 'ray', 'megatron', 'transformers', 'vime_r3') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_help_and_configurations_do_not_wait_for_the_database():
    code = """
import sys
from vime_buffer.cli import main
for words in (["serve", "--help"], ["serve", "--print-config"], ["serve", "--databases", "x"], ["stats", "--help"]):
    try:
        main(words)
    except SystemExit as end:
        print(end.code)
print([m for m in ("sqlalchemy", "prometheus_client", "vime_buffer._server") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    said = done.stdout.splitlines()
    assert said[-1] == "[]" and [line for line in said if line in ("0", "1", "2")] == ["0", "0", "2", "0"], done.stderr
