from __future__ import annotations

import sys

import pytest

from vime_launch.recipe import Recipe, RecipeError, check_recipe, load_recipe


def whole(**changes) -> dict:
    values: dict = {"name": "r1"} | {stage: {} for stage in ("buffer", "router", "engine", "worker", "trainer")}
    return {key: value for key, value in (values | changes).items() if value is not None}


def refusal(values: dict) -> str:
    with pytest.raises(RecipeError) as caught:
        check_recipe(values)
    return str(caught.value)


def test_unknown_keys_are_refused_with_the_nearest_name_everywhere():
    assert "did you mean 'buffer'" in refusal(whole(bufer={}))
    assert "engine.contig: unknown key 'contig'; did you mean 'config'" in refusal(whole(engine={"contig": {}}))
    assert "ray.adress: unknown key 'adress'; did you mean 'address'" in refusal(whole(ray={"adress": "x"}))
    assert "batch_groups" in refusal(whole(export_batches={"batch_group": 1}, trainer=None))


def test_what_a_stage_keeps_in_its_config_is_its_own_business():
    recipe = check_recipe(whole(engine={"config": {"anything": {"goes": 1}}}))
    assert recipe.engine.config == {"anything": {"goes": 1}}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"name": "../up"}, "name"),
        ({"trainer": {"count": 2}}, "trainer: count must be 1"),
        ({"trainer": {"restart": 1}}, "trainer.restart"),
        ({"engine": {"address": "nowhere"}}, "host:port"),
        ({"engine": {"address": "h:1", "python": "p"}}, "exclude each other"),
        ({"engine": {"address": "h:1", "restart": 1}}, "restart needs a process"),
        ({"worker": {"address": "h:1"}}, "count = 0"),
        ({"worker": None}, "needs [worker]"),
        ({"trainer": None}, "needs [export_batches]"),
        ({"router": None}, "[router] is missing"),
        ({"export_batches": {"batch_groups": 2, "group_size": 2}}, "has no [trainer]"),
        ({"trainer": {"config": {"import_batches": "x"}}}, "a train-only run has no [buffer], [router], [engine], [worker]"),
        ({"stop_seconds": 60.0}, "stop_seconds"),
    ],
)
def test_what_cannot_run_is_refused_by_name(changes, word):
    assert word in refusal(whole(**changes))


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, "train"),
        ({"router": {"address": "h:1"}, "engine": None}, "train"),
        ({"engine": {"address": ["h:1", "h:2"]}}, "train"),
        ({"trainer": {"address": "h:1"}, "buffer": {"address": "h:2"}}, "train"),
        ({"trainer": None, "export_batches": {"batch_groups": 2, "group_size": 2}}, "rollout-only"),
        ({"trainer": None, "router": None, "export_batches": {"batch_groups": 2, "group_size": 2}}, "rollout-only"),
        (
            {"buffer": None, "router": None, "engine": None, "worker": None, "trainer": {"config": {"import_batches": "x"}}},
            "train-only",
        ),
    ],
)
def test_start_matrix(changes, mode):
    assert check_recipe(whole(**changes)).mode == mode


def test_files_overrides_and_interpreters(tmp_path, monkeypatch):
    monkeypatch.delenv("VIME_PYTHON_ROUTER", raising=False)
    monkeypatch.setenv("VIME_PYTHON_ENGINE", "/env/python")
    path = tmp_path / "r.toml"
    path.write_text(
        'name = "r1"\n[buffer]\ncommand = "my-buffer --fast \'a b\'"\n[router]\n[engine]\n[worker]\npython = "/own/python"\n'
        "[trainer]\n[trainer.config]\nmax_steps = 3\n"
    )
    sets = ["trainer.config.max_steps=7", "trainer.config.r3=replay", "runs_dir='x y'", "engine.count=2"]
    recipe = load_recipe(path, sets, {"trainer": "/line/python"})
    assert recipe.trainer.config == {"max_steps": 7, "r3": "replay"}
    assert recipe.runs_dir == "x y" and recipe.engine.count == 2
    assert recipe.buffer.command == ["my-buffer", "--fast", "a b"]
    assert [recipe.router.python, recipe.engine.python, recipe.worker.python, recipe.trainer.python] == [
        sys.executable,
        "/env/python",
        "/own/python",
        "/line/python",
    ]
    with pytest.raises(RecipeError, match=r"a\.b=c"):
        load_recipe(path, ["nonsense"])
    with pytest.raises(RecipeError, match="No such file"):
        load_recipe(tmp_path / "missing.toml")
    path.write_text("name = ")
    with pytest.raises(RecipeError, match="not TOML"):
        load_recipe(path)


def test_defaults_survive_a_round_trip(tmp_path):
    from vime_launch import toml

    recipe = check_recipe(whole(engine={"config": {"on": True, "off": False, "text": 'a"b\\c\n'}}))
    path = tmp_path / "again.toml"
    path.write_text(toml.dumps(recipe.model_dump(mode="json", exclude_none=True)))
    again = Recipe(**__import__("tomllib").loads(path.read_text()))
    assert again == recipe
