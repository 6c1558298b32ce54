"""JSON lines, and parts that fail alone."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator
from typing import Any

__all__ = ["attempt", "failures", "say"]

failures: list[str] = []
"""Names of the parts that failed in this process."""


def say(**values: Any) -> None:
    """One JSON line on stdout."""
    print(json.dumps(values), flush=True)


@contextlib.contextmanager
def attempt(name: str) -> Iterator[None]:
    """A part whose failure is reported and does not end the others: time on a GPU host is dear."""
    try:
        yield
    except Exception as error:
        failures.append(name)
        say(part=name, failed=f"{type(error).__name__}: {error}"[-2000:])
        traceback.print_exc()
