"""`vime-trainer export`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from vime_proto.settings import Settings, load
from vime_trainer.settings.parallel import ParallelConfig

__all__ = ["ExportSettings", "main"]


class ExportSettings(Settings):
    """The policy of a checkpoint as a Hugging Face folder.

    The checkpoint may come from any number of ranks. A model that does not fit into one process is exported by several,
    started by torchrun: each holds its part, and the first one writes tensor by tensor.
    """

    model: Path = Field(description="Hugging Face folder that the run started from: config and tokenizer")
    checkpoint: Path = Field(description="one checkpoint, or a folder of checkpoints, of which the newest is taken")
    output: Path = Field(description="Hugging Face folder to write")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the run")
    parallel: ParallelConfig = ParallelConfig()


def main(argv: Sequence[str], prog: str) -> int:
    """Writes the folder and prints it."""
    settings = load(ExportSettings, argv, prog)
    from vime_trainer.checkpoint import find_latest, load_checkpoint
    from vime_trainer.policy import Policy

    policy = Policy.from_hf(settings.model, settings.dtype, parallel=settings.parallel)
    load_checkpoint(find_latest(settings.checkpoint) or settings.checkpoint, policy)
    written = policy.save_hf(settings.output)
    if policy.parallel.is_leader:
        print(written)
    return 0
