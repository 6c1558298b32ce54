"""``vime-r3 inspect`` and what it counts."""

import importlib.util

import numpy as np
import pytest

from vime_proto.routing.v1 import routing_pb2 as pb
from vime_proto.version import policy_version
from vime_r3.cli import main
from vime_r3.load import expert_load
from vime_r3.storage import TraceFiles
from vime_r3.trace import decode, encode

needs_tables = pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="needs vime-r3[inspect]")
V1, V2 = policy_version("run", 0, 1), policy_version("run", 0, 2)


@pytest.fixture
def ids(make_ids):
    return make_ids(40, layers=3)


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")

    def write(name, ids, **more):
        trace = encode(ids, **{"layer_ids": (2, 3, 5), "experts": 8, "version": V1} | more)
        file = tmp_path / name
        file.write_bytes(trace.SerializeToString())
        return str(file)

    return write


def test_load_of_the_experts():
    ids = np.array([[[0, 1]], [[0, 2]], [[0, 1]], [[3, 4]]], np.uint8)
    trace = encode(ids, layer_ids=(0,), experts=6, version=V1, valid=np.array([True, True, True, False]))
    load = expert_load(decode(trace))
    assert load.counts.tolist() == [[3, 2, 1, 0, 0, 0]] and load.tokens == 3
    assert load.imbalance.tolist() == [3.0] and load.unused.tolist() == [3]
    nothing = expert_load(decode(encode(ids[:0], layer_ids=(0,), experts=6, version=V1)))
    assert nothing.imbalance.tolist() == [0.0] and nothing.unused.tolist() == [6]


@needs_tables
def test_one_trace(write, ids, capsys):
    valid = np.arange(40) % 10 != 3
    spans = [(0, 20, V1), (20, 40, V2)]
    assert main(["inspect", write("one", ids, valid=valid, version=spans, inexact=[(20, 40)])]) == 0
    shown = capsys.readouterr().out
    for part in (
        "40 (a sample of 41 tokens)",
        "3 (2 to 5)",
        "8, top 2",
        "240 (6.0 a row, 1 chunks)",
        "4 rows: [3, 4) [13, 14) [23, 24) [33, 34)",
        "18 rows: [20, 40)",
        "run/0:1 rows [0, 20), run/0:2 rows [20, 40)",
    ):
        assert part in shown
    assert "agreement" not in shown


@needs_tables
def test_two_traces_agree_layer_by_layer(write, ids, capsys):
    other = ids.copy()
    other[:10, 1] = other[:10, 1, ::-1]  # the same sets
    other[10:20, 2] = (ids[10:20, 2] + 1) % 8
    changed = int((np.sort(ids[10:20, 2], -1) != np.sort(other[10:20, 2], -1)).any(-1).sum())
    arguments = [write("one", ids), write("two", other[:30], valid=np.arange(30) != 0)]
    assert main(["inspect", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "agreement over 29 rows that both have" in shown
    assert f"{1 - changed / 29:.4f}" in shown and f"{changed / (3 * 29):.4f} of row-layers differ" in shown


@needs_tables
def test_a_picture(write, ids, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "routes.png"
    assert main(["inspect", write("one", ids), write("two", ids), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and f"wrote {picture}" in capsys.readouterr().out


@needs_tables
def test_a_trace_by_uri(ids, tmp_path, capsys):
    pytest.importorskip("fsspec")
    trace = encode(ids, layer_ids=(2, 3, 5), experts=8, version=V1)
    file = tmp_path / "trace"
    file.write_bytes(TraceFiles(str(tmp_path / "routes")).write(trace, "a/b").SerializeToString())
    assert main(["inspect", str(file), "--root", str(tmp_path / "routes")]) == 0
    assert "40 (a sample of 41 tokens)" in capsys.readouterr().out
    assert main(["inspect", str(file)]) == 1
    assert "payload: is uri, not inline" in capsys.readouterr().err
    assert main(["inspect", str(file), "--root", str(tmp_path / "elsewhere")]) == 1
    assert "is not below" in capsys.readouterr().err


@needs_tables
def test_what_cannot_be_read_is_one_line(write, ids, tmp_path, capsys):
    bad = tmp_path / "bad"
    bad.write_bytes(b"\x0a\xff")
    empty = tmp_path / "empty"
    empty.write_bytes(pb.RoutingTrace().SerializeToString())
    for file, message in ((bad, "no serialized"), (empty, "experts"), (tmp_path / "gone", "No such file")):
        assert main(["inspect", str(file)]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and str(file) in error
    other = encode(ids[:, :2], layer_ids=(2, 3), experts=8, version=V1)
    bad.write_bytes(other.SerializeToString())
    assert main(["inspect", write("one", ids), str(bad)]) == 1
    assert "other: has layer_ids (2, 3), the first trace (2, 3, 5)" in capsys.readouterr().err


def test_missing_rich_names_the_extra(write, ids, monkeypatch, capsys):
    modules = __import__("sys").modules
    monkeypatch.setitem(modules, "rich.console", None)
    monkeypatch.delitem(modules, "vime_r3._show", raising=False)
    monkeypatch.delattr("vime_r3._show", raising=False)
    assert main(["inspect", write("one", ids)]) == 1
    assert "pip install 'vime-r3[inspect]'" in capsys.readouterr().err


def test_version(capsys):
    from vime_r3 import __version__

    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"
