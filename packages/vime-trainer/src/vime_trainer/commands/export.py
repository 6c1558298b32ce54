"""`vime-trainer export`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from vime_proto.settings import Settings, load

__all__ = ["ExportSettings", "main"]


class ExportSettings(Settings):
    """A checkpoint as a Hugging Face folder."""

    model: Path = Field(description="Hugging Face folder that the run started from: config and tokenizer")
    checkpoint: Path = Field(description="one checkpoint, or a folder of checkpoints, of which the newest is taken")
    output: Path = Field(description="Hugging Face folder to write")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the run")


def main(argv: Sequence[str], prog: str) -> int:
    """Writes the folder and prints it."""
    settings = load(ExportSettings, argv, prog)
    from vime_trainer.checkpoint import find_latest, load_checkpoint
    from vime_trainer.policy import Policy

    policy = Policy.from_hf(settings.model, settings.dtype)
    load_checkpoint(find_latest(settings.checkpoint) or settings.checkpoint, policy)
    print(policy.save_hf(settings.output))
    return 0
