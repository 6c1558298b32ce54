"""Configuration: explicit, typed, unknown keys refused."""

import json

import pytest
from pydantic import Field, field_validator

from vime_proto.errors import ContractError
from vime_proto.server import ServerOptions
from vime_proto.settings import Section, ServerSettings, Settings, load, merge


class Sampling(Section):
    temperature: float = 1.0
    stop: list[str] = []


class Demo(Settings):
    run_id: str
    steps: int = Field(3, ge=1, description="how many")
    capture: bool = True
    policy: str = "round_robin"
    sampling: Sampling = Sampling()
    server: ServerSettings = ServerSettings()


def _load(*argv: str) -> Demo:
    return load(Demo, ["--run-id", "r", *argv], "demo")


def _fails(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        _load(*argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_defaults_then_file_then_options(tmp_path):
    file = tmp_path / "demo.toml"
    file.write_text('steps = 5\npolicy = "x"\n[sampling]\ntemperature = 0.5\nstop = ["a"]\n')
    settings = _load("--config", str(file), "--sampling.temperature", "0.7", "--steps=7")
    assert (settings.steps, settings.policy, settings.sampling.temperature, settings.sampling.stop) == (
        7,
        "x",
        0.7,
        ["a"],
    )


def test_a_default_of_true_stays_and_can_be_turned_off():
    assert _load().capture is True
    assert _load("--capture").capture is True
    assert _load("--capture=false").capture is False


def test_texts_that_look_like_numbers_stay_texts():
    assert load(Demo, ["--run-id", "007"], "demo").run_id == "007"


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (("--stepz", "3"), ["stepz", "did you mean 'steps'?"]),
        (("--step", "3"), ["unknown key 'step'"]),
        (("--sampling.temperatur", "1"), ["sampling.temperatur", "did you mean 'temperature'?"]),
        (("--steps", "0"), ["steps", "greater than or equal to 1"]),
        (("--steps", "many"), ["steps", "many"]),
        (("--steps",), ["--steps needs a value"]),
        (("word",), ["unexpected argument 'word'"]),
        (("--config", "/nowhere.toml"), ["/nowhere.toml"]),
        (("--server.address", "x", "--policy", "p", "--server.token", "t"), ["server.token", "token_file"]),
    ],
)
def test_what_is_wrong_is_named(capsys, argv, texts):
    message = _fails(capsys, *argv)
    assert all(text in message for text in texts), message


def test_own_texts_stand_as_they_are(capsys):
    class Checked(Settings):
        name: str = "x"

        @field_validator("name")
        @classmethod
        def _known(cls, value: str) -> str:
            raise ValueError(f"unknown name {value!r}; valid: x")

    with pytest.raises(SystemExit):
        load(Checked, ["--name", "y"], "demo")
    assert capsys.readouterr().err == "demo: name: unknown name 'y'; valid: x\n"
    with pytest.raises(ContractError, match=r"^server\.address: 'x' is not host:port"):
        _load("--server.address", "x").server.options()


def test_a_missing_key_is_named(capsys):
    with pytest.raises(SystemExit):
        load(Demo, [], "demo")
    assert "run_id" in capsys.readouterr().err


def test_a_broken_file_is_named(capsys, tmp_path):
    (tmp_path / "x.toml").write_text("steps = = 3")
    assert "x.toml: not TOML" in _fails(capsys, "--config", str(tmp_path / "x.toml"))


def test_the_environment_is_not_read(monkeypatch):
    monkeypatch.setenv("STEPS", "9")
    monkeypatch.setenv("steps", "9")
    assert _load().steps == 3


def test_the_resolved_configuration_is_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        _load("--print-config", "--steps", "4")
    assert caught.value.code == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4


def test_help_names_every_key(capsys):
    with pytest.raises(SystemExit) as caught:
        _load("--help")
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(f"--{key}" in text for key in ("run_id", "steps", "sampling.temperature", "server.address"))


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        _load().steps = 4


def test_server_settings_become_options(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    options = ServerSettings(address="[::1]:5", max_message_mib=1, token_file=str(tmp_path / "token")).options()
    assert options == ServerOptions(address="[::1]:5", max_message_bytes=1 << 20, token="secret")
    with pytest.raises(ValueError, match="host:port"):
        ServerSettings(address="nowhere").options()
    with pytest.raises(IsADirectoryError, match="server.token_file: cannot read"):
        ServerSettings(token_file=str(tmp_path)).options()


def test_merging_changes_neither_side():
    base, over = {"a": {"b": 1, "c": 2}, "d": 1}, {"a": {"b": 3}}
    assert merge(base, over) == {"a": {"b": 3, "c": 2}, "d": 1}
    assert base == {"a": {"b": 1, "c": 2}, "d": 1}
