"""The table [weights] of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from vime_proto.settings import Section

__all__ = ["WeightsSettings"]


class WeightsSettings(Section):
    """How weights reach the engines."""

    transport: Literal["file", "shm", "stream"] = Field("shm", description="how the bytes travel")
    root: Path | None = Field(None, description="folder for file and shm; both sides reach it")
    chunk_bytes: int = Field(
        256 << 20, ge=1, description="size of a chunk; a layer's experts stay together all the same"
    )
    min_engines: int = Field(1, ge=1, description="engines that must have the weights before training goes on")
    in_flight: Literal["abort", "keep", "wait"] = Field("abort", description="requests in flight during an update")
    wait_seconds: float = Field(60.0, gt=0, description="most seconds that in_flight = wait waits")
    timeout_seconds: float = Field(600.0, gt=0, description="most seconds of one engine's update")
    retry_seconds: float = Field(10.0, ge=0, description="seconds for which an unreachable engine is tried")
    straggler_seconds: float = Field(
        60.0, ge=0, description="wait for further engines once min_engines have the weights"
    )
    engines_timeout_seconds: float = Field(600.0, gt=0, description="wait for min_engines to be listed by the router")
    attempts: int = Field(2, ge=1, description="times an update is tried before the run fails")
    part_bytes: int = Field(4 << 20, ge=1, le=128 << 20, description="bytes of one message of the stream transport")

    @model_validator(mode="after")
    def _root_where_needed(self) -> WeightsSettings:
        if self.transport == "file" and self.root is None:
            raise ValueError("root: needed by transport file; a folder that trainer and engines reach")
        if self.root is not None and not self.root.is_absolute():
            raise ValueError(f"root: must be an absolute path, got {str(self.root)!r}")
        return self
