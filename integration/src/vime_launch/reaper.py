"""Outlives a launcher by a few seconds: ``python reaper.py GRACE``. Standard library only.

Reads lines of ``pid:start-time`` words. When its input ends (the launcher is done, or was killed), it waits until every
process named so far has ended, at most GRACE seconds, and kills the rest. The start time keeps a reused process id safe.
"""

import os
import signal
import sys
import time

_POLL_SECONDS = 0.1


def started(pid):
    """Start time of a process; None when it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def alive(named):
    return {pid: start for pid, start in named.items() if started(pid) == start}


def main(grace):
    named = {}
    for line in sys.stdin:
        # A start time as of the latest line; a process that ended in between drops out.
        named = alive(named) | {int(pid): int(start) for pid, _, start in (word.partition(":") for word in line.split())}
    deadline = time.monotonic() + grace
    while (named := alive(named)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for pid in named:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main(float(sys.argv[1]))
