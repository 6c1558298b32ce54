"""Engine and trainer in bfloat16 choose other experts for many tokens; with the engine's routes the trainer is much nearer."""

from __future__ import annotations

import models
import numpy as np
import pytest
import replaying
from conftest import running

pytestmark = pytest.mark.skipif(
    not replaying.TRAINER, reason="VIME_PYTHON_TRAINER names no interpreter with vime-trainer"
)


@pytest.mark.timeout(900)
def test_replay_at_least_halves_the_difference(trainer, tmp_path):
    """7.4 million parameters, 6 layers of 64 experts, top-8: routers near ties."""
    config = models.config(moe=True, layers=6) | {
        "hidden_size": 128, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 48, "mlp_only_layers": [],
    }  # fmt: skip
    prompts = np.random.default_rng(2).integers(3, models.VOCAB, (5, 12)).tolist()
    with running("bfloat16", config, 5, "--route-capture", "--dtype", "bfloat16") as engine:
        answers = replaying.generate(engine, prompts, 60)
        got = trainer.replay(engine.folder, answers, tmp_path, "bfloat16")
    flips = got["flips"].sum() / (answers.has_row.sum() * len(answers.layer_ids))
    difference = {way: np.abs(answers.of_answers(got[way]) - answers.scores) for way in ("alone", "replayed")}
    mean = {way: float(values.mean()) for way, values in difference.items()}
    print(
        f"flips {flips:.3f} of row-layers; mean difference {mean['alone']:.5f} alone, {mean['replayed']:.5f} replayed"
    )
    assert flips > 0.05
    assert mean["replayed"] < 0.5 * mean["alone"]
