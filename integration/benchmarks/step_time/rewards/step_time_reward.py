"""A reward that costs nothing and differs within a group."""

from __future__ import annotations

import zlib
from typing import Any


def value(text: str) -> float:
    """A number in [0, 1] that depends on the text alone."""
    return zlib.crc32(text.encode()) % 8 / 7


def score(item: Any) -> float:
    """The same of what a worker hands to a reward."""
    return value(item.response)
