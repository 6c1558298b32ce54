"""The final picture of a run: reward, held-out accuracy and log-prob difference over steps."""

from __future__ import annotations

from pathlib import Path

from vime_launch.metrics import LOGPROB_DIFF, REWARD, Metrics


def draw(metrics: Metrics, path: Path, title: str) -> bool:
    """Writes a PNG; False, and no file, when there is nothing to draw."""
    reward, difference = metrics.series(REWARD), metrics.series(LOGPROB_DIFF)
    name, *accuracy = metrics.accuracy()
    if not (reward[0] or difference[0] or accuracy[0]):
        return False
    # Imported here: it takes a second, and a dry run draws nothing. The Agg canvas needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = [
        (reward, "reward, mean of the batch", (-0.02, 1.02), "linear"),
        ((accuracy[0], accuracy[1]), f"held-out accuracy ({name})" if name else "held-out accuracy", (-0.02, 1.02), "linear"),
        (difference, "|log-prob trainer - engine|, mean", None, "log"),
    ]
    for place, ((steps, values), label, limits, scale) in enumerate(panels, 1):
        axes = figure.add_subplot(1, 3, place)
        axes.set_title(label, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if not steps:
            axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
            continue
        axes.plot(steps, values, marker="o" if len(steps) < 20 else None, linewidth=1.4)
        if scale == "log" and all(value > 0 for value in values):
            axes.set_yscale("log")
        elif limits and limits[0] <= min(values) and max(values) <= limits[1]:
            axes.set_ylim(*limits)
    figure.savefig(path, dpi=110)
    return True
