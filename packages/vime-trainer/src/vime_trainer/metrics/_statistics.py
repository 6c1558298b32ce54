"""Figures of a batch. A figure of nothing is absent, never 0."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping

import numpy as np

LN2 = math.log(2.0)


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean, median, 99th percentile, maximum, and the share above ln 2: "<name>/mean" and so on."""
    if values.size == 0:
        return {}
    values = values.astype(np.float64)
    p50, p99 = np.percentile(values, (50, 99))
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/p50": float(p50),
        f"{name}/p99": float(p99),
        f"{name}/max": float(values.max()),
        f"{name}/share_above_ln2": float((values > LN2).mean()),
    }


def mean(name: str, values: np.ndarray) -> dict[str, float]:
    """The mean."""
    return {name: float(np.mean(values, dtype=np.float64))} if values.size else {}


def mean_and_std(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean and sample standard deviation (from two values on)."""
    figures = mean(f"{name}/mean", values)
    if values.size > 1:
        figures[f"{name}/std"] = float(np.std(values, dtype=np.float64, ddof=1))
    return figures


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Without figures that are NaN or infinite: they were not measured, and JSON has no word for them."""
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}


def peak_rss_bytes() -> int:
    """Most resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
