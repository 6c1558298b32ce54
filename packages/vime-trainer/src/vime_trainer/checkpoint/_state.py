"""What a checkpoint holds besides weights, moments and random states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["RunState"]


@dataclass(frozen=True)
class RunState:
    """Where a run stands.

    Attributes:
        step: batches trained.
        version: fields of the PolicyVersion of the weights; empty without one.
        cursor: position in the data, or of the buffer; whatever the loop needs to go on with the very next batch.
        run: settings that a resumed run must share, by name.
    """

    step: int
    version: dict[str, Any] = field(default_factory=dict)
    cursor: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
