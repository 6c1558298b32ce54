"""Starts the stages of a run on Ray, each through its command, and talks to them through their contracts alone.

Names load on first use, so that a Ray actor on a worker host imports only what it needs.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"Recipe": "recipe", "RecipeError": "recipe", "load_recipe": "recipe", "launch": "launcher"}

__version__ = "0.1.0"
__all__ = ["Recipe", "RecipeError", "launch", "load_recipe"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
