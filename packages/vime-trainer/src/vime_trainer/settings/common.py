"""Keys that more than one command has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

__all__ = ["Ranks", "TransformerEngineUse"]

Ranks = Annotated[
    int | None,
    Field(ge=1, description="trainer processes to start on this host; absent takes WORLD_SIZE"),
]

TransformerEngineUse = Annotated[
    Literal["auto", "on", "off"],
    Field(description="its layers: auto uses them where it is installed, for bfloat16 models without experts on a GPU"),
]
