"""The guard and the reaper, alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from vime_launch import guard, reaper
from vime_launch.process_tree import Watched, proportional, tree

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def guarded():
    """Starts a command under a guard; at the end its pipes are closed."""
    started: list[subprocess.Popen] = []

    def start(*command: str, grace: float = 5.0, **options) -> subprocess.Popen:
        words = [sys.executable, "-I", "-S", guard.__file__, str(grace), *command]
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, **options))
        return started[-1]

    yield start
    for one in started:
        for pipe in (one.stdin, one.stdout, one.stderr):
            if pipe is not None:
                pipe.close()
        one.wait(60)


def wait_until(condition, seconds: float = 60.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "not within the time allowed"
        time.sleep(0.02)
    return found


def test_the_status_is_the_commands_own(guarded):
    assert guarded(sys.executable, "-c", "raise SystemExit(7)").wait(60) == 7
    assert guarded(sys.executable, "-c", "import os; os.kill(os.getpid(), 9)").wait(60) == 137
    missing = guarded("/no/such/command", stderr=subprocess.PIPE, text=True)
    assert missing.wait(60) == 127 and "cannot start /no/such/command" in missing.stderr.read()


def test_started_and_stopped_fifty_times(guarded):
    for _ in range(50):
        process = guarded("/bin/sleep", "600")
        process.stdin.close()
        assert process.wait(60) == 128 + signal.SIGTERM


def test_what_a_command_leaves_behind_ends_with_it_and_nothing_else(guarded):
    bystander = subprocess.Popen(SLEEP)
    leave = f"import subprocess, sys; subprocess.Popen({SLEEP!r}, start_new_session=True); print('left', flush=True)"
    process = guarded(sys.executable, "-c", f"{leave}; import time; time.sleep(600)", stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"left\n"
        family = [seen.pid for seen in tree(process.pid)]
        assert len(family) == 3
        process.stdin.close()
        process.wait(60)
        assert not [pid for pid in family if pid != process.pid and reaper.started(pid)]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_command_that_ignores_sigterm_is_killed_after_its_grace(guarded):
    ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
    process = guarded(sys.executable, "-c", ignore, grace=0.3, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout.readline() == b"on\n"
    process.stdin.close()
    assert process.wait(60) == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_guard_that_is_told_to_stop_ends_its_command(guarded, number):
    process = guarded("/bin/sleep", "600")
    wait_until(lambda: len(tree(process.pid)) == 2)
    process.send_signal(number)
    assert process.wait(60) == 128 + signal.SIGTERM


def test_the_reaper_kills_what_it_was_told_of_and_what_still_is_the_same():
    told, other = subprocess.Popen(SLEEP), subprocess.Popen(SLEEP)
    try:
        words = [sys.executable, "-I", "-S", reaper.__file__, "0.2"]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, text=True)
        # The second one's start time is wrong: that process id now belongs to somebody else.
        process.communicate(f"{told.pid}:{reaper.started(told.pid)} {other.pid}:1\n", timeout=60)
        assert process.returncode == 0
        assert told.wait(60) == -signal.SIGKILL and other.poll() is None
    finally:
        for one in (told, other):
            one.kill()
            one.wait()


def test_memory_and_processes_are_those_of_the_whole_tree():
    watched = Watched(0.2)
    alone = sum(map(proportional, tree(os.getpid())))
    child = subprocess.Popen([sys.executable, "-c", "block = bytearray(64 << 20); print('on', flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert child.stdout.readline() == b"on\n"
    watched.sample()
    # The child shares some pages with this process, which count half in each from then on.
    assert watched.peak_bytes > alone + (48 << 20)
    assert watched.peak_gib == pytest.approx(watched.peak_bytes / 2**30, abs=1e-3)
    child.communicate(b"\n", timeout=60)
    watched.close()
