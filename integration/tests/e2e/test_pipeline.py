"""The whole pipeline with the real stages, each from its own environment."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from pathlib import Path

import pytest
from e2e_support import demo_recipe, stage_process, wait_until

from vime_launch import toml
from vime_launch.metrics import Metrics
from vime_launch.recipe import COMMANDS
from vime_proto.sample.v1 import sample_pb2

QUESTIONS, GROUPS, SIZE = 32, 4, 4


def groups_in(path: Path) -> list[sample_pb2.Group]:
    data, found = path.read_bytes(), []
    while data:
        (size,) = struct.unpack_from("<Q", data)
        found.append(sample_pb2.Group.FromString(data[8 : 8 + size]))
        data = data[8 + size :]
    return found


def contents(path: Path) -> tuple[str, list[str]]:
    """Batch id, and the ids of its groups in order."""
    return json.loads((path.parent / "batch.json").read_text())["batch_id"], [group.group_id for group in groups_in(path)]


def as_command(trainer: dict) -> dict:
    """The trainer's table with its command written out: such a one is not started a second time to check its configuration."""
    return trainer | {"command": [os.environ["VIME_PYTHON_TRAINER"], *COMMANDS["trainer"]]}


def recipe_for(home: Path, prepared: Path, engine: str, runs: str) -> dict:
    """A run of 32 questions, asked once each, in batches of 4 groups."""
    few = home / "few.jsonl"
    few.write_text("".join(line + "\n" for line in (prepared / "task/prompts.jsonl").read_text().splitlines()[:QUESTIONS]))
    recipe = demo_recipe(prepared)
    recipe |= {"name": "e2e", "runs_dir": str(home / runs), "engine": {"address": engine}}
    recipe["trainer"] = as_command(recipe["trainer"])
    prompts = [{"path": str(few), "text_field": "prompt", "answer_field": "answer"}]
    # A lease that nobody renews would hold for ten minutes: a resume that waited for it would not end in time.
    recipe["buffer"]["config"] = {"prompts": prompts, "lease_ttl_seconds": 600}
    return recipe


def write(path: Path, recipe: dict) -> str:
    path.write_text(toml.dumps(recipe))
    return str(path)


def test_a_wrong_key_of_the_last_stage_does_not_wait_for_the_others_to_start(vime, home, prepared):
    recipe = demo_recipe(prepared) | {"name": "wrong", "runs_dir": str(home / "wrong")}
    recipe["trainer"]["config"] |= {"max_stalenes": 1}
    assert vime.run("run", write(home / "wrong.toml", recipe)) == 2, vime.output
    assert "max_stalenes: unknown key 'max_stalenes'; did you mean 'max_staleness'" in vime.output
    assert "every stage is up" not in vime.output
    assert not (home / "wrong/wrong/recipe.toml").exists()


@pytest.fixture(scope="module")
def exported(vime, home, prepared, engine) -> Path:
    """A rollout-only run of two batches."""
    recipe = recipe_for(home, prepared, engine, "rollout-only")
    del recipe["trainer"]
    recipe["export_batches"] = {"batches": 2, "batch_groups": GROUPS, "group_size": SIZE}
    assert vime.run("run", write(home / "rollout.toml", recipe)) == 0, vime.output
    return home / "rollout-only/e2e/export"


def test_rollout_only_writes_batches(exported):
    groups = [group for path in sorted(exported.glob("*/groups.binpb")) for group in groups_in(path)]
    assert len(groups) == 2 * GROUPS and len({group.group_id for group in groups}) == 2 * GROUPS
    for group in groups:
        assert len(group.rollouts) == SIZE
        for rollout in group.rollouts:
            assert rollout.HasField("reward") and rollout.samples[0].routing.header.rows > 0
            versions = {one.generation.version.number for one in rollout.samples[0].segments if one.HasField("generation")}
            assert versions == {0}


def test_train_only_takes_them(vime, home, prepared, exported):
    recipe = demo_recipe(prepared)
    trainer = recipe["trainer"]["config"] | {"import_batches": str(exported), "evaluations": [], "max_staleness": 1}
    recipe = {"name": "alone", "runs_dir": str(home / "train-only"), "trainer": as_command(recipe["trainer"]) | {"config": trainer}}
    assert vime.run("run", write(home / "alone.toml", recipe)) == 0, vime.output
    folder = home / "train-only/alone"
    metrics = Metrics(folder / "metrics.jsonl")
    steps, differences = metrics.series("train_rollout_logprob_abs_diff/mean")
    assert steps == [1, 2]
    # The first batch was made by exactly these weights.
    assert differences[0] < 1e-5
    assert (folder / "trainer/final/model.safetensors").exists()


def test_a_killed_run_resumes_without_losing_or_repeating_anything(vime, home, prepared, engine, exported):
    recipe = recipe_for(home, prepared, engine, "resume")
    kept = home / "kept"
    recipe["trainer"]["config"] |= {
        "batch": {"groups": GROUPS, "group_size": SIZE, "epochs": 1, "token_budget": 4096},
        "checkpoint": {"interval": 2, "keep": 2},
        "export_batches": str(kept),
        "evaluations": [],
    }
    recipe["trainer"]["config"].pop("max_steps")
    path, folder = write(home / "resume.toml", recipe), home / "resume/e2e"

    def steps() -> int:
        file = folder / "metrics.jsonl"
        return max((json.loads(line)["step"] for line in file.read_text().splitlines()), default=0) if file.exists() else 0

    def kill(stage: str, after: int, *words: str) -> None:
        process = vime.start("run", path, *words)
        try:
            wait_until(lambda: steps() >= after, 300, process, lambda: vime.output[-3000:])
            os.kill(stage_process(folder, stage), signal.SIGKILL)
            killed = time.monotonic()
            assert process.wait(60) == 137, vime.output[-3000:]
            # Ten seconds where the machine has nothing else to do.
            assert time.monotonic() - killed < 30
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    kill("trainer", 3)
    before = {path.parent.name: contents(path) for path in kept.glob("*/groups.binpb")}
    # A launcher that was itself killed leaves no summary; the most memory that it saw counts all the same.
    (folder / "peak_rss_bytes").write_text(str(100 << 30))
    kill("worker-0", 5, "--resume", str(folder))
    # Goes on with two ranks, from checkpoints that one wrote.
    assert vime.run("run", path, "--resume", str(folder), "--set", "trainer.ranks=2") == 0, vime.output[-3000:]

    batches = sorted(kept.glob("*/groups.binpb"))
    trained = [group.group_id for one in batches for group in groups_in(one)]
    assert len(batches) == QUESTIONS // GROUPS
    assert len(trained) == len(set(trained)) == QUESTIONS, "every prompt is trained on, once"
    lineages = json.loads((folder / "trainer/lineages.json").read_text())["lineages"]
    assert len(lineages) == 3 and all(one["forked_at"] for one in lineages[1:])
    # The batch after the restored checkpoint was acked before the kill: it is trained again, the same groups in the same order.
    again = f"{lineages[1]['forked_at']:06d}"
    assert again in before and contents(kept / again / "groups.binpb") == before[again]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == QUESTIONS // GROUPS and summary["peak_rss_gib"] == 100

    # On policy, with the engine's routes: what it answered by is what both ranks trained.
    metrics = Metrics(folder / "metrics.jsonl")
    assert max(metrics.series("train_rollout_logprob_abs_diff/mean")[1]) < 1e-4
    assert set(metrics.series("rollouts")[1]) == {GROUPS * SIZE}
    assert "[rank 1] vime-trainer rl: finished" in (folder / "logs/trainer.log").read_text()
    assert (folder / "trainer/final/model.safetensors").exists()


def test_the_short_demo(vime, home, prepared):
    few = home / "held_out.jsonl"
    few.write_text("".join(line + "\n" for line in (prepared / "task/held_out.jsonl").read_text().splitlines()[:200]))
    held_out = f'buffer.config.evaluation.held_out.path="{few}"'
    assert vime.run("demo", "--short", "--name", "short", "--set", held_out) == 0, vime.output
    folder = home / "runs/short"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["staleness_max"] == 0
    assert summary["logprob_abs_diff_max"] < 1e-5
    assert summary["logprob_abs_diff_shifted_routes"] > 1000 * summary["logprob_abs_diff_max"]
    assert summary["rows_replayed"] > 0
    assert 0 < summary["peak_rss_gib"] < 12
    assert summary["transformers"]["asked"] > 0
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
    # No stage is left behind.
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(folder).encode() in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
