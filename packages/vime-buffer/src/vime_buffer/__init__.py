"""vime-buffer: prompts in, groups out, durable, between rollout and training."""

__version__ = "0.1.0"

from vime_buffer._server import BufferServer
from vime_buffer._store.database import DatabaseInUseError
from vime_buffer.hooks import KEEP, FilterDecision, GroupFilter, MessageFormat, drop
from vime_buffer.settings import BufferSettings, EvaluationSet, PromptFile

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
