"""The README's program does what it says."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_program_of_the_readme_runs(process):
    program = re.search(r"```python\n(import asyncio.*?)```", README, re.DOTALL)[1]
    program = program.replace("127.0.0.1:7070", process().address)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "COMMIT_OUTCOME_READY" in done.stdout and "reward: 1" in done.stdout and "trained: 1" in done.stdout


def test_the_hooks_of_the_readme_work():
    from vime_proto.sample.v1 import sample_pb2

    made = {}
    exec(re.search(r"```python\n(from vime_buffer import KEEP.*?)```", README, re.DOTALL)[1], made)
    assert made["messages"]({"question": "1+1="}) == [{"role": "user", "content": "1+1="}]
    solved = sample_pb2.Group(rollouts=[sample_pb2.Rollout(reward=1)])
    assert made["solvable"](solved).keep and not made["solvable"](sample_pb2.Group()).keep


def test_the_configuration_of_the_readme_is_valid():
    import tomllib

    from vime_buffer import BufferSettings

    values = tomllib.loads(re.search(r"```toml\n(.*?)```", README, re.DOTALL)[1])
    settings = BufferSettings(**values)
    assert settings.prompts[0].start == -1000 and settings.evaluation["held_out"].rollouts_per_prompt == 4
