"""Traces of chosen steps, and of the next one on request."""

import json
import os
import signal
import threading

from stages import Stages, settings_for
from toy import ToyBackend

from vime_trainer.profiler import Profiler, ProfilerSettings, requests_set
from vime_trainer.rl import train


def test_chosen_steps_are_traced(tmp_path):
    with Stages() as stages:
        train(settings_for(stages, tmp_path, max_steps=3, profiler={"steps": [1, 3]}), ToyBackend)
    traces = sorted((tmp_path / "traces").iterdir())
    assert [path.name for path in traces] == ["step-000001-rank-0.json", "step-000003-rank-0.json"]
    events = json.loads(traces[0].read_text())["traceEvents"]
    assert any("backward" in event.get("name", "").lower() for event in events)


def test_a_signal_asks_for_the_next_step(tmp_path):
    requested = threading.Event()
    profiler = Profiler(ProfilerSettings(folder=tmp_path), tmp_path, 3, requested)
    before = signal.getsignal(signal.SIGUSR2)
    with requests_set(requested):
        assert not profiler.wants(1)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert profiler.wants(2) and not profiler.wants(3)
    assert signal.getsignal(signal.SIGUSR2) == before
    with profiler.trace(2, True):
        pass
    with profiler.trace(3, False):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002-rank-3.json"]
