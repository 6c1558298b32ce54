from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from vime_launch.demo import Addition, Figures, faults, figures_of, write_task
from vime_launch.demo._task import all_sums, questions, sloppy_lessons, tokenizer
from vime_launch.metrics import Metrics


def test_sums():
    assert (Addition(47, 85).prompt, Addition(47, 85).answer) == ("<bos>47+85=", "132")
    assert Addition(47, 85).without_carries == "022"
    assert Addition(3, 4).prompt == "<bos>03+04=" and Addition(3, 4).answer == Addition(3, 4).without_carries == "007"
    assert Addition(3, 99).held_out == Addition(99, 3).held_out
    assert sum(one.held_out for one in all_sums()) == 1964


def test_nothing_that_trains_is_held_out():
    asked = {row["prompt"] for row in questions(held_out=True)}
    assert len(asked) == 1964
    assert not asked & {row["prompt"] for row in questions(held_out=False)}
    assert not asked & {row["prompt"] for row in sloppy_lessons(5000, 0)}


def test_the_teacher_is_as_sloppy_as_said():
    true = {one.prompt: one for one in all_sums()}
    lessons = [row for row in sloppy_lessons(20000, 3) if true[row["prompt"]].answer != true[row["prompt"]].without_carries]
    right = Counter(row["response"] == true[row["prompt"]].answer for row in lessons)
    assert right[True] / len(lessons) == pytest.approx(0.43, abs=0.015)
    assert list(sloppy_lessons(50, 3)) == list(sloppy_lessons(50, 3)) != list(sloppy_lessons(50, 4))


def test_one_token_a_character_and_back():
    made = tokenizer()
    ids = made.encode("<bos>47+85=", add_special_tokens=False).ids
    assert ids[0] == 1 and len(ids) == 7
    assert made.decode(made.encode("132<eos>").ids, skip_special_tokens=True) == "132"
    assert made.encode("132<eos>").ids[-1] == 2


def test_the_folder_holds_what_every_stage_reads(tmp_path):
    write_task(tmp_path, 10, 0)
    assert Tokenizer.from_file(str(tmp_path / "model/tokenizer.json")).encode("1").ids == [4]
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["model_type"] == "qwen3_moe" and config["vocab_size"] == 32
    lengths = {name: len((tmp_path / f"{name}.jsonl").read_text().splitlines()) for name in ("sft", "prompts", "held_out")}
    assert lengths == {"sft": 10, "prompts": 8036, "held_out": 1964}


GOOD = Figures(
    sft_accuracy=0.3,
    final_accuracy=0.95,
    logprob_abs_diff_max=2e-7,
    logprob_abs_diff_with_replay=2e-7,
    logprob_abs_diff_without_replay=3e-5,
    logprob_abs_diff_shifted_routes=0.05,
    rows_replayed=1000,
    rows_flipped=1,
    staleness_max=0.0,
    steps=40,
)


def test_acceptance():
    assert faults(GOOD, 0) == []
    assert "rose by 0.250" in faults(replace(GOOD, sft_accuracy=0.7), 0)[0]
    assert "ends at 0.800" in faults(replace(GOOD, final_accuracy=0.8), 0)[0]
    assert faults(replace(GOOD, final_accuracy=0.2), 0, learns=False) == []
    assert "reached 2.00e-05" in faults(replace(GOOD, logprob_abs_diff_max=2e-5), 0)[0]
    assert "less than 1000 times" in faults(replace(GOOD, logprob_abs_diff_shifted_routes=1e-4), 0)[0]
    coarse = replace(GOOD, logprob_abs_diff_max=6e-4, logprob_abs_diff_shifted_routes=1.9)
    assert len(faults(coarse, 0)) == 1 and faults(replace(coarse, logprob_abs_diff_shifted_routes=1.0), 0, difference=2e-3) == []
    assert "less than 100 times" in faults(replace(coarse, logprob_abs_diff_shifted_routes=0.01), 0, difference=2e-3)[0]
    assert "not below 2e-03" in faults(replace(coarse, logprob_abs_diff_max=3e-3), 0, difference=2e-3)[0]
    assert "no row was replayed" in faults(replace(GOOD, rows_replayed=0), 0)
    assert "lagged 1" in faults(replace(GOOD, staleness_max=1.0), 0)[0]
    assert faults(replace(GOOD, staleness_max=1.0, logprob_abs_diff_max=1e-2), 1) == []
    assert "no sample lagged" in faults(GOOD, 1)[0]
    assert "final_accuracy was not measured" in faults(replace(GOOD, final_accuracy=None), 0)


def test_figures_come_from_the_metrics():
    metrics = Metrics()
    metrics.add(0, 0.0, {"eval/held_out/reward_mean": 0.3})
    for step in (1, 2):
        metrics.add(step, 0.0, {
            "train_rollout_logprob_abs_diff/mean": step * 1e-7,
            "logprob_abs_diff_with_replay": 2e-7,
            "logprob_abs_diff_without_replay": 3e-5,
            "logprob_abs_diff_shifted_routes": 0.05,
            "r3/rows_replayed": 500.0,
            "r3/rows_flipped": step - 1.0,
            "staleness/max": 0.0,
        })  # fmt: skip
    # An accuracy before the last step is not the final one.
    metrics.add(1, 0.0, {"eval/held_out/reward_mean": 0.9})
    assert figures_of(metrics) == replace(GOOD, final_accuracy=None, steps=2)
    metrics.add(2, 0.0, {"eval/held_out/reward_mean": 0.95})
    assert figures_of(metrics) == replace(GOOD, steps=2)
