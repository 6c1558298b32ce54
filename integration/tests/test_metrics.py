from __future__ import annotations

import io
import json

from rich.console import Console

from vime_launch.live import View, line, time_shares
from vime_launch.metrics import LOGPROB_DIFF, REWARD, Metrics
from vime_launch.picture import draw

ROW = {
    REWARD: 0.5,
    LOGPROB_DIFF: 2e-7,
    "staleness/mean": 0.25,
    "tokens_per_second": 1234.5,
    "seconds/wait": 1.0,
    "seconds/publish": 0.5,
    "seconds/step": 2.0,
    "eval/held_out/reward_mean": 0.75,
}


def test_metrics_are_kept_and_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.add(0, 1.0, {"eval/held_out/reward_mean": 0.25})
    metrics.add(1, 2.0, {REWARD: 0.5})
    metrics.add(2, 3.0, {REWARD: 0.75})
    # A restored run trains step 2 again; what it says now counts. An evaluation adds to its step.
    metrics.add(2, 4.0, {REWARD: 0.8})
    metrics.add(2, 5.0, {"eval/held_out/reward_mean": 0.5})
    again = Metrics(path)
    assert again.rows == metrics.rows
    assert again.series(REWARD) == ([1, 2], [0.5, 0.8])
    assert again.accuracy() == ("eval/held_out/reward_mean", [0, 2], [0.25, 0.5])
    with path.open("a") as file:
        file.write('{"step": 3, "val')
    assert Metrics(path).rows == metrics.rows
    assert [json.loads(one)["step"] for one in path.read_text().splitlines()] == [0, 1, 2, 2, 2]


def test_where_the_time_goes_adds_up():
    assert time_shares(ROW) == [("wait", 0.5), ("publish", 0.25), ("other", 0.25)]
    assert time_shares({}) == []


def test_a_step_is_one_line_without_a_terminal():
    output = io.StringIO()
    with View(Console(file=output, width=40), "r1 (train)") as view:
        view.step(3, ROW)
    assert output.getvalue().count("\n") == 1
    for word in ("step 3", "reward 0.500", "log-prob diff 2.0e-07", "staleness 0.25", "tokens/s 1234", "wait 50%", "0.750"):
        assert word in output.getvalue()
    assert line(1, {}) == "step 1"


def test_the_table_of_a_terminal():
    output = io.StringIO()
    with View(Console(file=output, force_terminal=True, width=140), "r1 (train)") as view:
        view.step(3, ROW)
        view.stats("buffer: 4 prompts on loan")
    text = output.getvalue()
    for word in ("r1 (train)", "reward", "0.500", "2.0e-07", "1234", "held out", "0.750", "wait 50%", "4 prompts on loan"):
        assert word in text


def test_picture(tmp_path):
    metrics = Metrics()
    assert not draw(metrics, tmp_path / "none.png", "r1")
    assert not (tmp_path / "none.png").exists()
    for step in range(5):
        metrics.add(step, 0.0, {**ROW, REWARD: step / 5})
    assert draw(metrics, tmp_path / "p.png", "r1")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
