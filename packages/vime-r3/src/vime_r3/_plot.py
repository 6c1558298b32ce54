"""Traces for people, as a picture. Needs matplotlib: ``pip install 'vime-r3[inspect]'``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError:
    raise ImportError("--plot needs matplotlib: pip install 'vime-r3[inspect]'") from None

import numpy as np

from vime_r3.agreement import Agreement
from vime_r3.load import expert_load
from vime_r3.trace import Routes

__all__ = ["write"]


def write(file: Path, traces: Mapping[str, Routes], agreement: Agreement | None) -> None:
    """Writes a PNG: agreement by layer (of two traces), load of each expert by layer, and where the holes lie.

    Args:
        file: to write.
        traces: by name.
        agreement: of two traces; None for one.
    """
    panels = (agreement is not None) + 2 * len(traces)
    figure = Figure(figsize=(9, 2.6 * panels), layout="constrained")
    FigureCanvasAgg(figure)
    axes = iter(np.atleast_1d(figure.subplots(panels, 1)))
    if agreement is not None:
        axis = next(axes)
        axis.bar([str(layer) for layer in agreement.layer_ids], agreement.layer_agreement, color="tab:blue")
        axis.set(xlabel="layer", ylabel="agreement", ylim=(0, 1), title=f"agreement over {agreement.tokens} rows")
    for name, routes in traces.items():
        load = expert_load(routes)
        axis = next(axes)
        relative = load.counts / np.maximum(load.counts.mean(axis=1, keepdims=True), 1e-9)
        picture = axis.imshow(relative, aspect="auto", interpolation="nearest", cmap="magma")
        axis.set(xlabel="expert", ylabel="layer", title=f"{name}: load over the layer's mean")
        axis.set_yticks(range(len(load.layer_ids)), [str(layer) for layer in load.layer_ids], fontsize=6)
        figure.colorbar(picture, ax=axis)
        axis = next(axes)
        state = np.where(routes.exact, 0.0, np.where(routes.valid, 1.0, 2.0))[None]
        axis.imshow(state, aspect="auto", interpolation="nearest", cmap="Reds", vmin=0, vmax=2)
        axis.set(xlabel="row", title=f"{name}: holes dark, rows that cannot be replayed exactly light", yticks=[])
    figure.savefig(file, format="png", dpi=110)
