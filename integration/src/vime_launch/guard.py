"""Runs one command and outlives nothing: ``python guard.py GRACE COMMAND ...``. Standard library only.

The guard stands between a Ray actor and a stage. It holds the read end of a pipe from the actor on its standard input:
when the actor closes it, or dies in whatever way, the guard ends the command and every process that the command left
behind. It ends with the command's exit status (128 + n for signal n). It has its own session, so a Ctrl-C in the
terminal does not reach the stage: the launcher decides when stages end.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36


def _children():
    """Process ids whose parent is this process (Linux)."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid():
                found.append(int(name))
    return found


def _signal(group, number):
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _sweep_orphans():
    """Kills what the command left behind outside its process group: the kernel made those our children."""
    while orphans := _children():
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue


def main(grace, command):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    asked, ask = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(ask, b"x"))
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    ended = os.pidfd_open(process.pid)
    select.select([ended, 0, asked], [], [])
    if not select.select([ended], [], [], 0)[0]:
        # The command itself gets the signal, as from a terminal's `kill`: it winds its own children up.
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        select.select([ended], [], [], max(0.0, deadline - time.monotonic()))
        if not select.select([ended], [], [], 0)[0]:
            print(f"killed: still running {grace:g} s after SIGTERM", file=sys.stderr)
            _signal(process.pid, signal.SIGKILL)
    # Not yet reaped, the command still holds its process group's number, so that nobody else's group can be hit.
    _signal(process.pid, signal.SIGKILL)
    code = process.wait()
    _sweep_orphans()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    raise SystemExit(main(float(sys.argv[1]), sys.argv[2:]))
