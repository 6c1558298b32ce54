"""Algorithms by name, or by import path."""

from __future__ import annotations

import importlib

from vime_proto.errors import nearest

from ._types import Algorithm
from .cispo import CISPO
from .dapo import DAPO
from .dr_grpo import DR_GRPO
from .grpo import GRPO
from .gspo import GSPO
from .rloo import RLOO

ALGORITHMS = {one.name: one for one in (GRPO, DR_GRPO, RLOO, GSPO, CISPO, DAPO)}


def get_algorithm(name: str) -> Algorithm:
    """The algorithm called `name`, or the `Algorithm` at "module:attribute".

    Raises:
        ValueError: unknown name (with the nearest valid one), or nothing of that type at the import path.
    """
    if ":" not in name:
        if name not in ALGORITHMS:
            raise ValueError(f'algorithm.name: {nearest(name, ALGORITHMS, "algorithm")}, or "module:attribute"')
        return ALGORITHMS[name]
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"algorithm.name: cannot import {name!r}: {error}") from error
    if not isinstance(found, Algorithm):
        raise ValueError(
            f"algorithm.name: {name!r} is a {type(found).__name__}, not a vime_trainer.algorithms.Algorithm"
        )
    return found
