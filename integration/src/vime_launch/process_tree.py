"""The process tree of a run: its memory, and its end when the launcher cannot see to it (Linux)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from vime_launch import reaper


@dataclass(frozen=True)
class Seen:
    """A process as it was seen. ``started`` (clock ticks since boot) tells it from a later one with the same id."""

    pid: int
    parent: int
    started: int
    resident: int


def _all() -> Iterator[Seen]:
    page = os.sysconf("SC_PAGE_SIZE")
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            # It ended between the listing and the reading.
            continue
        yield Seen(int(name), int(fields[1]), int(fields[19]), int(fields[21]) * page)


def tree(root: int) -> list[Seen]:
    """``root`` and all its descendants."""
    known: dict[int, Seen] = {}
    children: dict[int, list[int]] = {}
    for seen in _all():
        known[seen.pid] = seen
        children.setdefault(seen.parent, []).append(seen.pid)
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        if pid in known:
            found.append(known.pop(pid))
            waiting += children.get(pid, [])
    return found


def proportional(seen: Seen) -> int:
    """Bytes of a process in memory, where a page that n processes share counts 1/n (PSS); its resident bytes where the kernel does
    not say."""
    try:
        with open(f"/proc/{seen.pid}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass  # it ended meanwhile, belongs to somebody else, or the kernel is older than 4.14
    return seen.resident


class Watched:
    """Samples the process tree of this process: launcher, Ray, and every stage that was started here.

    A reaper, in a session of its own, is told what was seen. When this process ends, in whatever way, it waits for the
    others to follow and kills those that do not: exactly the processes seen, and no other.

    Attributes:
        peak_bytes: the most memory of all processes together that was seen, also by an earlier launcher of the run. Pages that
            processes share count once (``proportional``).
    """

    def __init__(self, grace: float, peak_bytes: int = 0):
        self.peak_bytes = peak_bytes
        self._grace = grace
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def sample(self) -> None:
        """Looks at the tree now."""
        found = tree(os.getpid())
        # Proportional bytes take the kernel some milliseconds a process, and are never more than the resident ones.
        if sum(seen.resident for seen in found) > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, sum(map(proportional, found)))
        own = (os.getpid(), self._reaper.pid)
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(" ".join(f"{seen.pid}:{seen.started}" for seen in found if seen.pid not in own) + "\n")
        self._reaper.stdin.flush()

    def close(self) -> None:
        """Waits until everything that was seen has ended; what does not within the grace is killed."""
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        self._reaper.wait(self._grace + 5.0)

    @property
    def peak_gib(self) -> float:
        return round(self.peak_bytes / 2**30, 3)
