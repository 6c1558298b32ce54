"""Two ranks do what one process does: one start of two processes, and what came of each of its jobs."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from make import samples_of
from rank_jobs import (
    LAYOUTS,
    LIVE,
    PPO,
    jobs_of,
    megatron_settings,
    odd_batches,
    ppo_settings,
    sft_settings,
    start_two,
    write_inputs,
)
from safetensors.numpy import load_file
from stages import Stages
from test_faults import faulty
from test_loop import lines, steps
from test_services import import_settings
from toy import ToyBackend

from vime_proto.channel import open_sync_channel
from vime_proto.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from vime_trainer.checkpoint import list_steps
from vime_trainer.rl import train
from vime_trainer.rl._batches import read_groups
from vime_trainer.rl._megatron import MegatronBackend
from vime_trainer.sft import SftSettings, run_sft

KEYS = (
    "loss", "grad_norm", "tokens", "optimizer_steps", "optimizer_steps/empty", "reward/mean", "staleness/max",
    "train_rollout_logprob_abs_diff/mean", "train_rollout_logprob_abs_diff/p99", "train_rollout_logprob_abs_diff/max",
    "train_rollout_logprob_abs_diff/sequence_max", "train_rollout_kl", "policy/ratio", "policy/ratio_min",
    "policy/ratio_max", "policy/entropy", "policy/clip_fraction", "policy/kl", "policy/correction_weight",
)  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Folder of all outputs, and results by job and rank."""
    tmp = tmp_path_factory.mktemp("ranks")
    odd = odd_batches(tmp / "odd_batches")
    write_inputs(tmp)
    (tmp / "results").mkdir()
    with (
        Stages(rows=40) as data,
        Stages(rows=40) as tensor,
        Stages(faulty(rows=40)) as pipeline,
        Stages(rows=400) as served,
        Stages(workers=False) as waiting,
        ThreadPoolExecutor(1) as beside,
    ):
        pipeline.buffer.spoil = 1
        stages = {"data": data, "tensor": tensor, "pipeline": pipeline, "served": served, "waiting": waiting}
        asked = beside.submit(ask, tmp / "served" / "address")
        assert start_two(tmp, jobs_of(stages, tmp, odd)) == [0, 0]
        answers = asked.result(timeout=10)
        engines = {name: one.engines[0].machine.version for name, one in stages.items()}
        weights = {name: dict(one.engines[0].model.tensors) for name, one in stages.items()}
    results = [json.loads((tmp / "results" / f"{rank}.json").read_text()) for rank in range(2)]
    results[0]["answers"] = answers
    return tmp, results, engines, weights


def ask(address_file):
    """Uses the TrainerService of the run that listens there: what it answered."""
    end = time.monotonic() + 140
    while not address_file.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    with open_sync_channel(address_file.read_text()) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        stream = stub.StreamMetrics(trainer_pb2.StreamMetricsRequest(from_step=1), timeout=60)
        first = next(stream).metrics
        saved = stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(request_id="save"), timeout=60)
        stopped = stub.Stop(trainer_pb2.StopRequest(request_id="stop", reason="enough"))
        steps = [first.step, *(one.metrics.step for one in stream)]
    return {"loss": first.values["loss"], "saved": saved.batch, "stopped": stopped.after_step, "steps": steps}


def figures_of(row):
    """What does not depend on time; what was not measured is absent on both sides."""
    return {key: value for key, value in row.items() if key in KEYS}


def one_process(settings):
    made = []
    train(settings, lambda given: made.append(ToyBackend(given)) or made[-1])
    return made[-1]


@pytest.mark.parametrize("name", LIVE)
def test_two_ranks_equal_one_process(name, ran, tmp_path):
    tmp, results, _, _ = ran
    assert [one[name] for one in results] == [["finished", "finished"]] * 2
    _, changes = LIVE[name]
    batch = {"groups": 4, "group_size": 2, "token_budget": 20, **changes.get("batch", {})}
    one_process(import_settings(tmp / name / "batches", tmp_path, **{**changes, "batch": batch}))
    rows, expected = steps(tmp / name), steps(tmp_path)
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == [1, 2, 3]
    for row, other in zip(rows, expected, strict=True):
        assert figures_of(row) == pytest.approx(figures_of(other), rel=1e-5, abs=1e-6)
    assert_weights_equal(tmp / name, tmp_path)


@pytest.mark.parametrize("name", LIVE)
def test_engines_have_the_weights_of_all_ranks(name, ran):
    tmp, _, engines, weights = ran
    assert (engines[name].lineage, engines[name].number) == (1, 3)
    final = load_file(tmp / name / "final" / "model.safetensors")
    for key, value in weights[name].items():
        np.testing.assert_array_equal(final[key], value, err_msg=key)
    # On policy, so the engines really have what is trained.
    assert all(row["train_rollout_logprob_abs_diff/mean"] < 1e-6 for row in steps(tmp / name))


def test_only_the_first_rank_writes(ran):
    tmp, *_ = ran
    for name in LIVE:
        assert [row["step"] for row in steps(tmp / name)] == [1, 2, 3]
        assert [row["lineage"] for row in steps(tmp / name)] == [0, 0, 1]
        assert list_steps(tmp / name / "checkpoints")[-1] == 3


def test_status_metrics_checkpoint_and_stop_are_of_all_ranks(ran):
    tmp, results, *_ = ran
    answers = results[0]["answers"]
    assert [one["served"] for one in results] == [["stopped"]] * 2
    assert answers["steps"] == list(range(1, answers["stopped"] + 1))
    assert answers["loss"] == pytest.approx(steps(tmp / "served")[0]["loss"])
    assert list_steps(tmp / "served" / "checkpoints")[-1] == answers["stopped"] >= answers["saved"] >= 1


def test_ranks_without_a_trainable_token(ran, tmp_path):
    tmp, results, _, _ = ran
    assert [one["odd"] for one in results] == [["finished"]] * 2
    one_process(import_settings(tmp / "odd_batches", tmp_path))

    mine, expected = ([figures_of(row) for row in lines(output)] for output in (tmp / "odd", tmp_path))
    assert [row["optimizer_steps/empty"] for row in mine] == [0, 1, 0]
    assert "loss" not in mine[1] and mine[0]["grad_norm"] > 0
    for row, other in zip(mine, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-6)


def test_what_one_rank_refuses_all_refuse(ran):
    _, results, *_ = ran
    for one in results:
        assert one["what_one_rank_refuses_all_refuse"] == [[["a"], ["b"], ["0", "1"], "nothing"]]


def test_a_failure_of_one_rank_is_named_on_the_others(ran):
    _, results, *_ = ran
    said = [one["a_failure_of_one_rank_is_named_on_the_others"][0] for one in results]
    assert said == ["RankLostError: rank 1 failed; its last line says why", "OSError: disk full"]


def test_a_signal_to_any_rank_ends_all(ran):
    _, results, *_ = ran
    assert [one["an_interrupt_of_one_rank_ends_all"] for one in results] == [["interrupted, True"]] * 2
    # While the first rank waits for a batch as well.
    assert [one["waiting"] for one in results] == [["interrupted"]] * 2


@pytest.fixture(scope="module")
def alone(ran, tmp_path_factory):
    """The same runs of the real model, in this process."""
    tmp, *_ = ran
    output = tmp_path_factory.mktemp("alone")
    for name, r3 in {"rl": "replay", "rl_recorded": "record"}.items():
        train(megatron_settings(tmp, output / name, r3=r3), MegatronBackend)
    train(ppo_settings(tmp, output / "ppo"), MegatronBackend)
    run_sft(SftSettings(**{**sft_settings(tmp, "sft"), "output": output / "sft"}))
    return output


def assert_weights_equal(mine, expected, name="final"):
    ours, others = (load_file(folder / name / "model.safetensors") for folder in (mine, expected))
    assert ours.keys() == others.keys()
    for key, value in others.items():
        np.testing.assert_allclose(ours[key], value, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_one_process(name, ran, alone):
    tmp, results, *_ = ran
    assert [one[name] for one in results] == [["finished"]] * 2
    rows, expected = steps(tmp / name), steps(alone / "rl")
    assert [row["step"] for row in rows] == [1, 2]
    for row, other in zip(rows, expected, strict=True):
        assert figures_of(row) == pytest.approx(figures_of(other), rel=2e-4, abs=2e-6)
        routes = {key: value for key, value in other.items() if key.startswith("r3/")}
        assert {key: row[key] for key in routes} == routes
        for key in ("rows_replayed", "holes", "inexact", "rows_flipped"):
            assert 0 < routes[f"r3/{key}"] < routes["r3/rows"]
    # The engine had the very weights of the first step, whatever the layout.
    assert rows[0]["train_rollout_logprob_abs_diff/max"] < 1e-5 < rows[0]["logprob_abs_diff_shifted_routes"]
    assert_weights_equal(tmp / name, alone / "rl")


@pytest.mark.parametrize("name", ["tp2", "pp2", "cp2"])
def test_measurements_of_one_micro_batch_equal_those_of_one_process(name, ran, alone):
    """With every route one row late, a rank reads rows of tokens that another routes."""
    tmp, *_ = ran
    for way in ("with_replay", "without_replay", "shifted_routes"):
        key = f"logprob_abs_diff_{way}"
        found, expected = (steps(folder)[0][key] for folder in (tmp / name, alone / "rl"))
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-6)


def test_the_old_policys_own_routes_under_context_parallelism_equal_one_process(ran, alone):
    tmp, results, *_ = ran
    assert [one["cp2_recorded"] for one in results] == [["finished"]] * 2
    assert not any(sum(fetch.values()) for one in results for fetch in one["cp2_recorded/received"])
    rows, expected = steps(tmp / "cp2_recorded"), steps(alone / "rl_recorded")
    for row, other in zip(rows, expected, strict=True):
        assert figures_of(row) == pytest.approx(figures_of(other), rel=2e-4, abs=2e-6)
        routes = {key: value for key, value in other.items() if key.startswith("r3/")}
        assert {key: row[key] for key in routes} == routes
        assert routes["r3/rows_replayed"] == routes["r3/rows"] > 0 == routes["r3/holes"]
    assert_weights_equal(tmp / "cp2_recorded", alone / "rl_recorded")


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_receive_their_part_of_the_routes(name, ran):
    """Counted where they arrive, of a buffer: bytes of the rows' ids."""
    tmp, results, *_ = ran
    traces = samples_of(read_groups(tmp / "answers" / "000000" / "groups.binpb"))
    whole = {key: len(one.routing.inline) for key, one in traces.items()}
    for batch in range(2):
        first, second = (one[f"{name}/received"][batch] for one in results)
        mine, others, total = sum(first.values()), sum(second.values()), sum(whole.values())
        if name in ("dp2", "ep2"):
            assert first | second == whole and not first.keys() & second.keys()
        elif name == "pp2":
            assert all(first[key] == second[key] == size // 2 for key, size in whole.items())
        else:
            # Most rows are needed by one rank in one cut of the batch and by the other in another.
            assert mine < total > others and total <= mine + others < 2 * total


@pytest.mark.parametrize("name", PPO)
def test_a_critic_on_two_ranks_equals_one_process(name, ran, alone):
    """Also across a resume, which restores both models and both optimizers."""
    tmp, results, *_ = ran
    assert [one[name] for one in results] == [["finished", "finished"]] * 2
    rows, expected = steps_of(tmp / name), steps_of(alone / "ppo")
    assert [row["optimizer_steps"] for row in rows] == [0, 2]
    for row, other in zip(rows, expected, strict=True):
        assert figures_of(row) == pytest.approx(figures_of(other), rel=2e-4, abs=2e-6)
        critic = {key: value for key, value in other.items() if key.startswith("critic/")}
        assert {key: row[key] for key in critic} == pytest.approx(critic, rel=2e-4, abs=2e-6)
        assert critic["critic/grad_norm"] > 0
    assert_weights_equal(tmp / name, alone / "ppo")
    assert_weights_equal(tmp / name, alone / "ppo", "final-critic")


def steps_of(output):
    return [row for row in lines(output) if "optimizer_steps" in row]


@pytest.mark.parametrize("name", LAYOUTS)
def test_fine_tuning_under_every_layout_equals_one_process(name, ran, alone):
    tmp, results, *_ = ran
    assert [one[f"sft_{name}"] for one in results] == [[str(tmp / f"sft_{name}" / "final")]] * 2
    rows, expected = lines(tmp / f"sft_{name}"), lines(alone / "sft")
    assert [row["step"] for row in rows] == [1, 2]
    for row, other in zip(rows, expected, strict=True):
        for key in ("loss", "grad_norm", "tokens", "learnt_tokens", "epoch"):
            assert row[key] == pytest.approx(other[key], rel=1e-4), key
    assert_weights_equal(tmp / f"sft_{name}", alone / "sft")


def test_a_rank_that_dies_is_noticed(tmp_path):
    (tmp_path / "results").mkdir()
    name = "a_rank_that_dies_is_noticed"
    before = time.monotonic()
    assert start_two(tmp_path, [{"name": name, "layout": {}, "check": name}])[1] == 9
    said = json.loads((tmp_path / "results" / "0.json").read_text())[name][0]
    assert said.startswith("another rank ended or does not answer (") and "\n" not in said
    assert time.monotonic() - before < 60
