from __future__ import annotations

import subprocess
import sys

import pytest

import vime_launch
from vime_launch.cli import main


def test_public_names():
    assert vime_launch.__all__ == ["Recipe", "RecipeError", "launch", "load_recipe"]
    assert all(getattr(vime_launch, name) for name in vime_launch.__all__)


def test_the_command_line_takes_no_prefix_for_a_name(capsys):
    for argv in (["run", "r.toml", "--dry"], ["run", "r.toml", "--python.train", "p"], ["demo", "--max-stale", "1"]):
        try:
            main(argv)
        except SystemExit as ended:
            assert ended.code == 2
        else:
            raise AssertionError(f"{argv} was taken")
    assert "unrecognized arguments" in capsys.readouterr().err


def test_bad_input_is_one_line_a_fault_and_status_2(tmp_path, capsys):
    path = tmp_path / "r.toml"
    path.write_text('name = "r1"\nbufer = 1\n')
    assert main(["run", str(path)]) == 2
    assert "did you mean 'buffer'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--seeds", "0"], "--seeds: must be at least 1, got 0"),
        (["--steps", "0"], "--steps: must be at least 1, got 0"),
        (["--max-staleness", "-1"], "--max-staleness: must be at least 0, got -1"),
        (["--max-difference", "0"], "--max-difference: must be above 0, got 0"),
        (["--seed", "x"], "--seed: invalid whole number value: 'x'"),
    ],
)
def test_wrong_numbers_of_the_demo_are_refused_before_anything_is_written(words, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *words])
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_trainer_that_cannot_be_started_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--python.trainer", "/nowhere/python"]) == 2
    assert "vime: trainer: cannot start /nowhere/python: No such file" in capsys.readouterr().err


def test_a_stage_package_never_comes_along():
    code = "import vime_launch.cli, vime_launch.launcher, vime_launch.demo, sys; "
    code += "print(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "vllm", "megatron", "ray", "transformers", "matplotlib"}
    assert {one for one in loaded if one.startswith("vime_")} == {"vime_launch", "vime_proto"}
