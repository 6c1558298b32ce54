from __future__ import annotations

from vime_launch.launcher import _earlier_peak
from vime_launch.plan import RunFolder
from vime_launch.process_tree import Watched


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
