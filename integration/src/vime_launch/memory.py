"""Memory of a whole process tree (Linux)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator


def _parents() -> Iterator[tuple[int, int, int]]:
    """(process id, parent's id, resident bytes) of every process that can be read."""
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
        yield int(name), int(fields[1]), int(fields[21]) * page


def tree(root: int) -> dict[int, int]:
    """Resident bytes of ``root`` and all its descendants, by process id. Pages that processes share count in each."""
    children: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    for pid, parent, size in _parents():
        resident[pid] = size
        children.setdefault(parent, []).append(pid)
    found: dict[int, int] = {}
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        if pid in resident and pid not in found:
            found[pid] = resident[pid]
            waiting += children.get(pid, [])
    return found


class Peak:
    """The largest sum of resident bytes over the process tree of this process: launcher, Ray and every stage started here."""

    def __init__(self) -> None:
        self.bytes = 0

    def sample(self) -> None:
        self.bytes = max(self.bytes, sum(tree(os.getpid()).values()))

    async def watch(self, seconds: float = 1.0) -> None:
        while True:
            self.sample()
            await asyncio.sleep(seconds)

    @property
    def gib(self) -> float:
        return round(self.bytes / 2**30, 3)
