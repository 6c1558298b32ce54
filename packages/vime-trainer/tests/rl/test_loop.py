"""The whole loop against fakes of buffer, router and engines."""

import json

import pytest
from stages import Stages, code_of, settings_for
from toy import ToyBackend

from vime_trainer.rl import train


def lines(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def steps(output):
    return [line for line in lines(output) if "loss" in line]


def run(settings):
    made = []

    def make(given):
        made.append(ToyBackend(given))
        return made[-1]

    return train(settings, make), made[-1]


def test_on_policy_training_end_to_end(tmp_path):
    with Stages(engines=2) as stages:
        reason, backend = run(settings_for(stages, tmp_path, max_steps=4))
        assert reason == "finished"
        rows = steps(tmp_path)
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        for row in rows:
            # The engines really run the trainer's weights, of the very last update.
            assert row["train_rollout_logprob_abs_diff/mean"] < 1e-6
            assert row["staleness/max"] == 0
            assert row["policy/ratio_min"] == row["policy/ratio_max"] == 1
            assert row["publish/engines"] == 2 and row["publish/chunks"] > 1
            assert row["rollouts"] == 8 and row["tokens"] > 0
            assert row["grad_norm"] > 0 and row["optimizer_steps"] == 1
        assert len(backend.trained) == 4
        for engine in stages.engines:
            version = engine.machine.version
            assert (version.lineage, version.number) == (0, 4)
            for name, value in backend.hf_tensors():
                assert (engine.model.tensors[name] == value.numpy()).all()
        run_row = stages.buffer.store.runs["run"]
        assert run_row.trained == 4 and run_row.closed and run_row.version.number == 4
        assert (tmp_path / "final" / "model.safetensors").exists()
