"""The .proto files: generated code is what they say, every part is documented, presence is explicit where 0 is a value."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PROTOS = sorted((SOURCE / "vime_proto").glob("*/v1/*.proto"))


def test_there_is_a_contract_for_each_area():
    areas = ["buffer", "common", "rollout", "router", "routing", "sample", "trainer", "weights"]
    assert [path.stem for path in PROTOS] == areas
    for path in PROTOS:
        assert f"package vime.{path.stem}.v1;" in path.read_text()


def _generator():
    spec = importlib.util.spec_from_file_location("generate", SOURCE.parent / "scripts" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_code_is_what_the_contracts_generate():
    pytest.importorskip("grpc_tools", reason="grpcio-tools at the floor versions is needed")
    assert _generator().drift() == []


def test_the_generator_demands_the_floors_of_the_package():
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    floors = dict(one.split(">=") for one in project["dependencies"])
    wanted = _generator().FLOORS
    assert wanted["protobuf"] == floors["protobuf"]
    assert wanted["grpcio-tools"].startswith(floors["grpcio"])


def test_the_floors_are_what_generated_code_demands():
    for path in SOURCE.glob("vime_proto/*/v1/*_pb2.py"):
        assert "# Protobuf Python Version: 6.31.1" in path.read_text()
    for path in SOURCE.glob("vime_proto/*/v1/*_pb2_grpc.py"):
        assert "GRPC_GENERATED_VERSION = '1.74.0'" in path.read_text()


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_every_part_is_documented(path):
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        declares = re.match(
            r"\s*(message|enum|service|rpc|oneof) |\s*(repeated |optional |map<)?[\w.<>, ]+ \w+ = \d+;", line
        )
        speaks_for_itself = "_UNSPECIFIED = 0;" in line or line.strip().startswith("DTYPE_")
        if declares and not speaks_for_itself:
            assert lines[number - 1].strip().startswith("//"), f"{path.name}:{number + 1}: {line.strip()}"


def test_numbers_that_may_be_zero_have_presence():
    text = "\n".join(path.read_text() for path in PROTOS)
    for name in (
        "reward",
        "number",
        "lineage",
        "temperature",
        "ordinal",
        "trained",
        "start",
        "stop",
        "offset",
        "step",
        "row",
        "epoch",
    ):
        declared = re.findall(rf"^\s*(\w+ )?(?:double|u?int(?:32|64)) {name} = ", text, re.M)
        assert declared, name
        assert all(one in ("optional ", "repeated ") for one in declared), name


def test_mutating_calls_have_a_request_id():
    reads = re.compile(r"^(Get|List|Fetch|Watch|Stream|Renew|Abort$|Score|Generate|SendChunks|LoadChunks)")
    for path in PROTOS:
        text = path.read_text()
        for call, request in re.findall(r"rpc (\w+)\((?:stream )?(\w+)\)", text):
            body = re.search(rf"message {request} \{{(.*?)\n?\}}", text, re.S).group(1)
            if not reads.match(call):
                assert "string request_id = " in body, f"{path.stem}: {call}"
