"""Where a demo step's time goes, from the metrics of a run.

``python bench_step.py [RUN_FOLDER]`` reads a run that is done; without a folder it runs the short demo first (each
stage's interpreter from ``VIME_PYTHON_<STAGE>``). Prints the median over steps of each part;
writes nothing into the repository.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from vime_launch.metrics import SECONDS, STEP_SECONDS, TOKENS_PER_SECOND, Metrics

_STEPS = 12


def breakdown(metrics: Metrics, skip: int = 1) -> dict[str, float]:
    """Median seconds of each part of a step over all steps but the first ``skip``; "other" is what no part accounts for."""
    rows = [metrics.rows[step] for step in metrics.series(STEP_SECONDS)[0]]
    rows = rows[skip:] or rows
    parts = sorted({name for row in rows for name in row if name.startswith(SECONDS)})
    medians = {name.removeprefix(SECONDS): statistics.median(row.get(name, 0.0) for row in rows) for name in parts}
    medians["other"] = medians["step"] - sum(value for name, value in medians.items() if name != "step")
    return medians


def main(folder: Path | None) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        if folder is None:
            command = [sys.executable, "-m", "vime_launch", "demo", "--short", "--steps", str(_STEPS), "--runs-dir", scratch]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            folder = Path(scratch) / "demo"
        metrics = Metrics(folder / "metrics.jsonl")
    parts = breakdown(metrics)
    whole = parts.pop("step")
    print(f"{platform.node()}, {platform.machine()}, {len(metrics.series(STEP_SECONDS)[0])} steps, median of all but the first")
    print(f"{'step':<18} {whole:8.3f} s")
    for name, seconds in sorted(parts.items(), key=lambda one: -one[1]):
        print(f"  {name:<16} {seconds:8.3f} s  {seconds / whole:6.1%}")
    speed = metrics.series(TOKENS_PER_SECOND)[1]
    print(f"{'tokens trained/s':<18} {statistics.median(speed):8.0f}" if speed else "tokens/s not measured")
    print(json.dumps({"step_seconds": whole, "parts": parts}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
