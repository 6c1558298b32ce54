"""vime-buffer: prompts in, groups out, durable, between rollout and training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

from vime_buffer.hooks import KEEP, FilterDecision, GroupFilter, MessageFormat, drop
from vime_buffer.settings import BufferSettings, EvaluationSet, PromptFile

if TYPE_CHECKING:
    from vime_buffer._server import BufferServer
    from vime_buffer._store.database import DatabaseInUseError

# These need the database's library, for which whoever reads a configuration should not wait.
_LATE = {"BufferServer": "vime_buffer._server", "DatabaseInUseError": "vime_buffer._store.database"}

__all__ = [
    "KEEP",
    "BufferServer",
    "BufferSettings",
    "DatabaseInUseError",
    "EvaluationSet",
    "FilterDecision",
    "GroupFilter",
    "MessageFormat",
    "PromptFile",
    "__version__",
    "drop",
]


def __getattr__(name: str) -> object:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
