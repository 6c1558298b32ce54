"""Life and death of processes."""

import os
import signal
import subprocess
import sys
import time

from vime_proto.process import write_address_file

CHILD = """
import os, sys, time
from vime_proto.process import exit_with_parent
exit_with_parent(0.1)
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
sys.stdin.readline()
"""


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _gone(pid: int, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while _alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not _alive(pid)


def test_a_child_ends_with_its_parent_however_that_ends():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert _alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()
    assert _gone(child)


# As process 1 of a container: a child of it has a parent like any other. (A process id namespace of its own would need rights.)
UNDER_INIT = """
import os
os.getppid = lambda: 1
from vime_proto.process import exit_with_parent
exit_with_parent(0.05)
print("runs", flush=True)
"""
# The parent ends while the child imports.
ORPHANED = """
import os
from vime_proto.process import exit_with_parent
os.getppid = lambda: 1
exit_with_parent(0.05)
print("runs", flush=True)
"""


def test_process_1_is_a_parent_like_any_other():
    done = subprocess.run([sys.executable, "-c", UNDER_INIT], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr


def test_a_parent_that_ended_before_the_watch_began_is_noticed():
    done = subprocess.run([sys.executable, "-c", ORPHANED], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr


def test_an_address_file_appears_whole(tmp_path):
    path = tmp_path / "deep" / "address"
    write_address_file(path, "[::1]:5")
    write_address_file(path, "127.0.0.1:6")
    assert path.read_text() == "127.0.0.1:6"
    assert os.listdir(path.parent) == ["address"], "nothing is left behind"


def test_sigterm_stops_a_served_fake_within_seconds(tmp_path):
    command = [sys.executable, "-m", "vime_proto.fakes", "buffer", "--address-file", str(tmp_path / "address")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process.stdout as output:
        line = output.readline()
    assert line == f"listening on {(tmp_path / 'address').read_text()}\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
