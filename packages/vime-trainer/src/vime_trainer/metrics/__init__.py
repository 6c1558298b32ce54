"""Figures of a step, and where they are written."""

from vime_trainer.settings.metrics import MetricsSettings, WandbSettings

from ._prometheus import PrometheusWriter
from ._statistics import finite, mean, mean_and_std, peak_rss_bytes, spread
from ._writers import JsonlWriter, TensorBoardWriter, WandbWriter, Writer, open_writers

__all__ = [
    "JsonlWriter",
    "MetricsSettings",
    "PrometheusWriter",
    "TensorBoardWriter",
    "WandbSettings",
    "WandbWriter",
    "Writer",
    "finite",
    "mean",
    "mean_and_std",
    "open_writers",
    "peak_rss_bytes",
    "spread",
]
