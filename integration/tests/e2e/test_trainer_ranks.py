"""The whole pipeline with a trainer of two ranks."""

from __future__ import annotations

from e2e_support import demo_recipe
from test_pipeline import write

from vime_launch.metrics import Metrics


def test_two_trainer_ranks_train_what_the_engine_answers(vime, home, prepared, engine):
    recipe = demo_recipe(prepared) | {"name": "e2e", "runs_dir": str(home / "ranks"), "engine": {"address": engine}}
    recipe["trainer"] |= {"ranks": 2}
    recipe["trainer"]["config"] |= {
        "batch": {"groups": 8, "group_size": 4, "token_budget": 4096},
        "checkpoint": {"interval": 2},
        "evaluations": [],
        "max_staleness": 0,
        "max_steps": 3,
    }
    assert vime.run("run", write(home / "ranks.toml", recipe)) == 0, vime.output[-4000:]
    folder = home / "ranks/e2e"
    metrics = Metrics(folder / "metrics.jsonl")
    steps, differences = metrics.series("train_rollout_logprob_abs_diff/mean")
    assert steps == [1, 2, 3]
    # On policy, with the engine's routes: what it answered by is what both ranks trained.
    assert max(differences) < 1e-4
    assert metrics.series("rollouts")[1] == [32, 32, 32]
    assert (folder / "trainer/final/model.safetensors").exists()
    assert "[rank 1] vime-trainer rl: finished" in (folder / "logs/trainer.log").read_text()
