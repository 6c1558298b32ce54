"""Where prompts come from."""

from vime_buffer._sources.jsonl import JsonlFile, RowError
from vime_buffer._sources.mapping import FieldMapping
from vime_buffer._sources.source import PromptSource

__all__ = ["FieldMapping", "JsonlFile", "PromptSource", "RowError"]
