"""The whole loop against fakes of buffer, router and engines."""

import json

import pytest
from stages import Stages, code_of, prompts, settings_for
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


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("max_steps", [1, 2, 3])
def test_every_combination_of_steps_and_lag_ends(max_steps, lag, tmp_path):
    with Stages() as stages:
        reason, backend = run(settings_for(stages, tmp_path, max_steps=max_steps, max_staleness=lag))
        assert reason == "finished" and len(backend.trained) == max_steps
        assert all(row["staleness/max"] <= lag for row in steps(tmp_path))
        assert stages.buffer.store.runs["run"].version.number == max_steps


def test_asynchronous_training_shows_its_staleness(tmp_path):
    with Stages(rows=40) as stages:
        run(settings_for(stages, tmp_path, max_steps=6, max_staleness=1))
        rows = steps(tmp_path)
        assert max(row["staleness/max"] for row in rows) == 1
        assert all(0 <= row["staleness/mean"] <= row["staleness/max"] for row in rows)


def test_publishing_less_often_still_publishes_the_last(tmp_path):
    with Stages(rows=40) as stages:
        run(settings_for(stages, tmp_path, max_steps=5, max_staleness=2, publish_interval=2))
        rows = steps(tmp_path)
        assert [row["step"] for row in rows if "publish/bytes" in row] == [2, 4, 5]
        assert stages.buffer.store.runs["run"].version.number == 5


def test_several_optimizer_steps_a_batch(tmp_path):
    with Stages() as stages:
        _, backend = run(settings_for(stages, tmp_path, max_steps=2, batch={"optimizer_steps": 2}))
        assert len(backend.trained) == 4
        assert all(row["optimizer_steps"] == 2 for row in steps(tmp_path))


def test_the_end_of_the_data_gives_a_short_batch_and_ends_the_run(tmp_path):
    with Stages(rows=6) as stages:
        reason, backend = run(settings_for(stages, tmp_path, max_steps=None, batch={"epochs": 1}))
        assert reason == "finished"
        assert [len(step) for step in backend.trained] == [4, 2]
        assert sorted(code for step in backend.trained for code in step) == sorted(code_of(i) for i in range(6))


def test_every_prompt_is_trained_once_in_the_order_of_the_buffer(tmp_path):
    with Stages(rows=12) as stages:
        _, backend = run(settings_for(stages, tmp_path, max_steps=None, batch={"epochs": 1}))
        trained = [code for step in backend.trained for code in step]
        assert sorted(trained) == sorted(code_of(i) for i in range(12))


@pytest.mark.parametrize("wait", [True, False])
def test_evaluations_at_the_start_in_between_and_at_the_end(wait, tmp_path):
    evaluation = {"set": "held_out", "interval": 2, "wait": wait}
    with Stages() as stages:
        run(settings_for(stages, tmp_path, max_steps=4, evaluations=[evaluation]))
        rows = [line for line in lines(tmp_path) if "eval/held_out/reward_mean" in line]
        assert [row["step"] for row in rows] == [0, 2, 4]
        for row in rows:
            assert row["eval/held_out/coverage"] == 1
            assert 0 <= row["eval/held_out/pass_at_1"] <= 1
            assert row["eval/held_out/failed_rollouts"] == 0
            if wait:
                assert row["eval/held_out/versions"] == 1
        keys = {tuple(sorted(row)) for row in rows}
        assert len(keys) == 1  # waiting or not, the same figures at the same steps


def test_the_end_of_the_data_evaluates_what_was_not_evaluated_just_before(tmp_path):
    evaluations = [{"set": "one", "interval": 3}, {"set": "other", "interval": 2}]
    with Stages(rows=12, evaluations={"one": prompts(2, 500), "other": prompts(2, 600)}) as stages:
        run(settings_for(stages, tmp_path, max_steps=None, batch={"epochs": 1}, evaluations=evaluations))
    for name, at in (("one", [0, 3]), ("other", [0, 2, 3])):
        assert [line["step"] for line in lines(tmp_path) if f"eval/{name}/reward_mean" in line] == at


def test_evaluations_can_be_left_out_at_either_end(tmp_path):
    with Stages() as stages:
        evaluation = {"set": "held_out", "at_start": False, "at_end": False, "interval": 2}
        run(settings_for(stages, tmp_path, max_steps=3, evaluations=[evaluation]))
        rows = [line for line in lines(tmp_path) if "eval/held_out/reward_mean" in line]
        assert [row["step"] for row in rows] == [2]


def test_an_unknown_evaluation_set_is_named(tmp_path):
    import grpc

    from vime_proto.errors import describe

    with Stages() as stages:
        settings = settings_for(stages, tmp_path, evaluations=[{"set": "held_uot"}])
        with pytest.raises(grpc.RpcError) as error:
            run(settings)
        assert "did you mean 'held_out'" in describe(error.value)


def test_same_keys_with_and_without_staleness(tmp_path):
    keys = []
    for lag in (0, 1):
        with Stages() as stages:
            run(settings_for(stages, tmp_path / str(lag), max_steps=2, max_staleness=lag))
            keys.append([sorted(row) for row in steps(tmp_path / str(lag))])
    assert keys[0] == keys[1]


def test_a_finished_run_goes_on_when_it_is_given_more_steps(tmp_path):
    with Stages(rows=40) as stages:
        run(settings_for(stages, tmp_path, max_steps=2))
        reason, backend = run(settings_for(stages, tmp_path, max_steps=4))
        assert reason == "finished" and len(backend.trained) == 4
        assert [row["step"] for row in steps(tmp_path)] == [1, 2, 3, 4]
        assert [row["lineage"] for row in steps(tmp_path)] == [0, 0, 1, 1]
        versions = [engine.machine.version for engine in stages.engines]
        assert [(v.lineage, v.number) for v in versions] == [(1, 4)]
