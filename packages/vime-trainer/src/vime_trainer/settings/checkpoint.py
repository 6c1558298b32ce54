"""Settings of checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vime_proto.settings import Section

__all__ = ["CheckpointSettings"]


class CheckpointSettings(Section):
    """The `[checkpoint]` table."""

    interval: int = Field(0, ge=0, description="steps between checkpoints; 0 writes one at the end only")
    keep: int = Field(2, ge=1, description="newest checkpoints that are kept")
    asynchronous: bool = Field(
        False, description="write beside training, from a copy in host memory of what each rank writes"
    )
    resume: Literal["auto", "must", "never"] = Field(
        "auto",
        description="auto goes on from the newest checkpoint if there is one; must demands one; never refuses one",
    )
