"""Ranks started by the command itself: what is shown, and that they live and die together."""

import signal
import subprocess
import sys
import time

import pytest

ENDLESS = "import time; print('up', flush=True)\nwhile True: time.sleep(0.05)"


def start(script, count=2):
    """`run_ranks` in a process of its own."""
    command = [sys.executable, "-c", script]
    code = (
        f"import sys; from vime_trainer.ranks import run_ranks; sys.exit(run_ranks({count}, {command!r}, 'prog', 0.5))"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(script, count=2):
    with start(script, count) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_every_rank_knows_its_place_and_rank_0_speaks_for_all():
    script = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR')))"
    code, out, err = outcome(script, 3)
    assert code == 0 and out == "0 3 0 127.0.0.1\n"
    assert sorted(err.splitlines()) == ["[rank 1] 1 3 1 127.0.0.1", "[rank 2] 2 3 2 127.0.0.1"]


@pytest.mark.parametrize(
    ("end", "last"),
    [
        ("sys.exit(3)", "prog: rank 1 failed with status 3"),
        ("os.kill(os.getpid(), 9)", "prog: rank 1 was ended by SIGKILL"),
    ],
)
def test_one_that_fails_ends_all(end, last):
    # Rank 0 notices nothing, and ends when it is told to.
    script = f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(60)"
    before = time.monotonic()
    code, _, err = outcome(script)
    assert code == (3 if "exit" in end else 1)
    assert err.splitlines()[-1] == last
    assert time.monotonic() - before < 30


def test_rank_0_gives_its_own_reason():
    code, _, err = outcome("import os, sys\nif os.environ['RANK'] == '0': sys.exit('no model')")
    assert code == 1 and err.splitlines() == ["no model"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_rank(number):
    script = f"import signal, sys\nfor n in (2, 15): signal.signal(n, lambda *a: sys.exit(0))\n{ENDLESS}"
    with start(script) as process:
        assert process.stdout.readline() == "up\n" and process.stderr.readline() == "[rank 1] up\n"
        process.send_signal(number)
        process.communicate(timeout=20)
        assert process.returncode == 0


def test_a_command_without_a_handler_ends_by_the_signal():
    with start(ENDLESS) as process:
        assert process.stdout.readline() == "up\n" and process.stderr.readline() == "[rank 1] up\n"
        process.terminate()
        _, err = process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGTERM and "rank" not in err
