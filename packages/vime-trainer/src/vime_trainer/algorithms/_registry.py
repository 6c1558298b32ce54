"""Algorithms by name, or by import path."""

from __future__ import annotations

import importlib
from dataclasses import replace

from vime_proto.errors import nearest

from ._types import Algorithm
from .cispo import CISPO
from .dapo import DAPO
from .distillation import DISTILLATION
from .dppo import DPPO
from .dr_grpo import DR_GRPO
from .grpo import GRPO
from .gspo import GSPO, GSPO_TOKEN
from .maxrl import MAXRL
from .ppo import PPO
from .reinforce_plus_plus import REINFORCE_PLUS_PLUS, REINFORCE_PLUS_PLUS_BASELINE
from .rloo import RLOO

_ALL = (
    GRPO,
    DR_GRPO,
    RLOO,
    REINFORCE_PLUS_PLUS,
    REINFORCE_PLUS_PLUS_BASELINE,
    GSPO,
    GSPO_TOKEN,
    CISPO,
    DAPO,
    DPPO,
    MAXRL,
    PPO,
    DISTILLATION,
)
ALGORITHMS = {one.name: one for one in _ALL}


def get_algorithm(name: str) -> Algorithm:
    """The algorithm called `name`, or the `Algorithm` at "module:attribute".

    Raises:
        ValueError: unknown name (with the nearest valid one), or nothing of that type at the import path.
    """
    if ":" not in name:
        if name not in ALGORITHMS:
            raise ValueError(f'algorithm.name: {nearest(name, ALGORITHMS, "algorithm")}, or "module:attribute"')
        return ALGORITHMS[name]
    found = _import(name, "algorithm.name")
    if not isinstance(found, Algorithm):
        raise ValueError(
            f"algorithm.name: {name!r} is a {type(found).__name__}, not a vime_trainer.algorithms.Algorithm"
        )
    return found


def algorithm_of(settings) -> Algorithm:
    """The algorithm that `AlgorithmSettings` name, with the user's own advantage or loss where they name one.

    Raises:
        ValueError: as `get_algorithm`, or an import path that holds nothing to call.
    """
    algorithm = get_algorithm(settings.name)
    own = {key: getattr(settings, key) for key in ("advantage", "loss") if getattr(settings, key) is not None}
    for key, path in own.items():
        if ":" not in path:
            raise ValueError(f'algorithm.{key}: {path!r} must be "module:function"')
        own[key] = _import(path, f"algorithm.{key}")
        if not callable(own[key]):
            raise ValueError(f"algorithm.{key}: {path!r} is a {type(own[key]).__name__}, not a function")
    return replace(algorithm, **own)


def _import(path: str, field: str):
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{field}: cannot import {path!r}: {error}") from error
