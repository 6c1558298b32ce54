from __future__ import annotations

import json
import os

import pytest

from vime_launch.dry_run import dry_run
from vime_launch.recipe import RecipeError, check_recipe


def test_every_stage_says_what_it_would_run_with_and_nothing_is_made(recipes):
    recipe = check_recipe(recipes.values(trainer={"config": {"steps": 9}}, engine={"count": 2}))
    text = dry_run(recipe, dict(os.environ))
    parts = {part.partition("\n")[0]: part.partition("\n")[2] for part in text.split("# ")[1:]}
    assert list(parts) == ["buffer", "router", "engine-0", "engine-1", "worker-0", "trainer"]
    assert json.loads(parts["trainer"])["steps"] == 9
    assert json.loads(parts["trainer"])["output"] == str(recipes.run / "trainer")
    assert not recipes.run.exists()


def test_the_faults_of_every_stage_are_shown_together(recipes):
    wrong = {"config": {"no_such_key": 1}}
    recipe = check_recipe(recipes.values(trainer=wrong, buffer=wrong, router={"command": ["/nowhere/found"]}))
    with pytest.raises(RecipeError) as caught:
        dry_run(recipe, dict(os.environ))
    lines = str(caught.value).splitlines()
    assert lines == [
        "buffer: test-buffer: unknown key 'no_such_key'",
        "router: cannot start /nowhere/found: No such file or directory",
        "trainer: test-trainer: unknown key 'no_such_key'",
    ]


def test_processes_elsewhere_are_named(recipes):
    recipe = check_recipe(recipes.values(buffer={"command": [], "address": "h:1"}))
    assert "# buffer\nruns at h:1" in dry_run(recipe, dict(os.environ))
