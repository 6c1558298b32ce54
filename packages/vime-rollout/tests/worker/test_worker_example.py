"""The example plug-in works, and imports public names alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from test_worker_environment import saying
from test_worker_failures import one_group

import vime_rollout.rewards
import vime_rollout.worker
from vime_proto.sample.v1 import sample_pb2 as pb

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_it_imports_public_names_alone():
    for path in EXAMPLES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("vime_"):
                assert "._" not in node.module
                public = {"vime_rollout.rewards": vime_rollout.rewards, "vime_rollout.worker": vime_rollout.worker}
                assert {one.name for one in node.names} <= set(public[node.module].__all__)


async def test_its_environment_plays(stage, tokenizer):
    script = saying(tokenizer, "Is it 50?", "42")
    prompt = pb.Prompt(prompt_id="p", text="ignored", answer="42")
    group = await one_group(stage, script, prompt, environment="guessing_game:GuessingGame")
    for rollout in group.rollouts:
        assert rollout.reward == 0.75 and rollout.metrics == {"guesses": 2.0}
        (sample,) = rollout.samples
        assert sum(one.role == pb.SEGMENT_ROLE_TOOL for one in sample.segments) == 1


async def test_its_reward_scores_in_a_process(stage, tokenizer):
    rewards = {"brief": {"function": "guessing_game:brief", "most_characters": 5}}
    prompt = pb.Prompt(prompt_id="p", text="x", answer="42")
    group = await one_group(stage, saying(tokenizer, "it is 42"), prompt, reward="brief", rewards=rewards)
    for rollout in group.rollouts:
        assert rollout.reward == 0.5 and rollout.rewards == {"brief": 0.5, "characters": 8.0}
