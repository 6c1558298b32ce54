from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from vime_launch.launcher import _earlier_peak
from vime_launch.plan import RunFolder
from vime_launch.process_tree import Seen, Watched, proportional, tree


def test_the_peak_of_a_run_covers_every_launcher_that_it_had(tmp_path):
    folder = RunFolder(tmp_path)
    assert _earlier_peak(folder) == 0
    (folder / "peak_rss_bytes").write_text(f"{3 << 40}\n")
    watched = Watched(1.0, _earlier_peak(folder))
    try:
        watched.sample()
        assert watched.peak_gib == 3072
    finally:
        watched.close()


def test_memory_that_processes_share_counts_once(tmp_path):
    size = 64 << 20
    (tmp_path / "shared").write_bytes(b"x" * size)
    # Every page is read, and stays mapped until the standard input ends.
    reader = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print(sum(m[::4096])); sys.stdin.read()"
    command = [sys.executable, "-u", "-c", reader, str(tmp_path / "shared")]
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(2)
        ]
        for child in children:
            assert int(child.stdout.readline()) == ord("x") * (size >> 12)
        pids = {child.pid for child in children}
        both = [seen for seen in tree(os.getpid()) if seen.pid in pids]
        summed = sum(map(proportional, both))
        assert size < summed < sum(seen.resident for seen in both) - size // 2


def test_where_the_kernel_does_not_tell_resident_bytes_count():
    assert proportional(Seen(1 << 30, 1, 0, 4096)) == 4096
