from __future__ import annotations

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_launch import toml
from vime_launch.plan import UNKNOWN, RunFolder, connect, processes, write_config
from vime_launch.recipe import RecipeError, check_recipe

STAGES = {stage: {"python": f"/{stage}/python"} for stage in ("buffer", "router", "engine", "worker", "trainer")}


def plan_of(tmp_path, **changes):
    values = {"name": "r1", **STAGES, **changes}
    recipe = check_recipe({key: value for key, value in values.items() if value is not None})
    folder = RunFolder(tmp_path / "r1")
    folder.make()
    return processes(recipe, folder), folder


def test_every_process_is_told_what_the_others_are(tmp_path):
    plan, folder = plan_of(tmp_path, engine={"python": "p", "count": 2})
    assert [one.name for one in plan] == ["buffer", "router", "engine-0", "engine-1", "worker-0", "trainer"]
    for port, process in enumerate(plan):
        process.address = f"127.0.0.1:{port + 1}"
    known = {one.name: connect(one, plan) for one in plan}
    assert known["engine-1"]["router"] == "127.0.0.1:2" and known["engine-1"]["engine_id"] == "engine-1"
    assert [known[name]["seed"] for name in ("engine-0", "engine-1")] == [0, 1]
    assert known["worker-0"]["buffer"] == "127.0.0.1:1" and known["worker-0"]["rollout"] == "127.0.0.1:2"
    assert known["trainer"]["buffer"] == "127.0.0.1:1" and known["trainer"]["router"] == "127.0.0.1:2"
    assert all(config["exit_with_parent"] for config in known.values())
    assert {known[name]["run_id"] for name in ("engine-0", "worker-0", "trainer")} == {"r1"}
    command = write_config(plan[-1], known["trainer"], folder)
    assert command[:4] == ["/trainer/python", "-m", "vime_trainer", "rl"] and command[4] == "--config"
    assert tomllib.loads(folder.config("trainer").read_text()) == known["trainer"]


def test_an_engine_of_a_later_life_is_told_where_the_trainer_is(tmp_path):
    plan, _ = plan_of(tmp_path)
    engine, trainer = plan[2], plan[-1]
    assert "weights" not in connect(engine, plan)
    trainer.address = "127.0.0.1:7"
    assert connect(engine, plan)["weights"] == "127.0.0.1:7"


def test_before_anything_runs_addresses_stand_as_unknown(tmp_path):
    plan, _ = plan_of(tmp_path)
    assert connect(plan[-1], plan)["buffer"] == UNKNOWN


def test_engines_elsewhere_are_named_to_the_router(tmp_path):
    plan, _ = plan_of(tmp_path, engine={"address": ["h:1", "[::1]:2"]})
    router = next(one for one in plan if one.kind == "router")
    assert connect(router, plan)["engines"] == [
        {"id": "engine-0", "address": "h:1"},
        {"id": "engine-1", "address": "[::1]:2"},
    ]


def test_without_a_router_the_worker_asks_the_engine(tmp_path):
    plan, _ = plan_of(tmp_path, router=None, trainer=None, export_batches={"batch_groups": 1, "group_size": 2})
    next(one for one in plan if one.kind == "engine").address = "h:5"
    worker = next(one for one in plan if one.kind == "worker")
    assert connect(worker, plan)["rollout"] == "h:5"


def test_what_the_recipe_states_holds(tmp_path):
    stated = {"buffer": "elsewhere:1", "server": {"address": "0.0.0.0:5"}, "output": "${run}/out"}
    plan, folder = plan_of(tmp_path, trainer={"python": "p", "config": stated})
    config = connect(plan[-1], plan, host="10.0.0.1")
    assert config["buffer"] == "elsewhere:1" and config["server"]["address"] == "0.0.0.0:5"
    assert config["output"] == str(folder.path / "out")


def test_on_several_hosts_servers_listen_on_their_own(tmp_path):
    plan, _ = plan_of(tmp_path)
    assert connect(plan[0], plan, host="10.0.0.1")["server"]["address"] == "10.0.0.1:0"
    assert connect(plan[0], plan, host="fd00::1")["server"]["address"] == "[fd00::1]:0"


def test_ranks_are_passed_to_the_trainer(tmp_path):
    plan, folder = plan_of(tmp_path, trainer={"python": "p", "ranks": 4})
    assert write_config(plan[-1], {}, folder)[:6] == ["p", "-m", "vime_trainer", "rl", "--ranks", "4"]
    with pytest.raises(RecipeError, match="engine.ranks: only a trainer"):
        plan_of(tmp_path, engine={"python": "p", "ranks": 2})


def test_a_command_takes_the_place_of_the_interpreter(tmp_path):
    plan, folder = plan_of(tmp_path, buffer={"command": "go-buffer --x"})
    assert write_config(plan[0], {}, folder)[:3] == ["go-buffer", "--x", "--config"]


text = st.text(st.characters(exclude_categories=["Cs"]))
plain = st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | text
leaves = plain | st.lists(plain, max_size=3)
# Three levels of tables, spelled out: deeper ones take the same path.
values = leaves | st.dictionaries(text, leaves | st.dictionaries(text, leaves, max_size=3), max_size=4)


@settings(deadline=None)
@given(st.dictionaries(text, values, max_size=5))
def test_toml_reads_back_what_was_written(table):
    assert tomllib.loads(toml.dumps(table)) == table


def test_toml_has_tables_in_lists_and_leaves_none_out():
    assert tomllib.loads(toml.dumps({"a": [{"b": 1, "c": {"d": "x"}, "e": None}], "n": None})) == {"a": [{"b": 1, "c": {"d": "x"}}]}
    with pytest.raises(TypeError, match="object"):
        toml.dumps({"a": object()})
