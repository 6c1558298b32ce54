"""A model family: what to add one file for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vime_trainer.models._architecture import Architecture
from vime_trainer.models._config_file import HfConfig
from vime_trainer.models._weights import Weight

__all__ = ["Family"]


@dataclass(frozen=True)
class Family:
    """Models that differ only in their sizes.

    Attributes:
        name: `model_type` in config.json.
        architectures: names of the transformers classes.
        architecture: reads sizes from config.json; refuses what the family does not compute.
        weights: the table of weights.
        exported: keys of config.json that have these values in an exported folder, where the source has them at all.
    """

    name: str
    architectures: tuple[str, ...]
    architecture: Callable[[HfConfig], Architecture]
    weights: tuple[Weight, ...]
    exported: Mapping[str, Any] = field(default_factory=dict)
