"""`vime-trainer init`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from vime_proto.settings import Settings, load

__all__ = ["InitSettings", "main"]


class InitSettings(Settings):
    """Random weights for a config.json."""

    model_config_file: Path = Field(description="config.json of the model, or the folder that holds it")
    output: Path = Field(description="Hugging Face folder to write; must not exist")
    tokenizer: Path | None = Field(None, description="folder whose tokenizer files are copied along")
    seed: int = Field(0, ge=0, description="of the weights, which depend on it and on their names alone")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the weights")


def main(argv: Sequence[str], prog: str) -> int:
    """Writes the folder and prints it."""
    settings = load(InitSettings, argv, prog)
    if settings.output.exists():
        raise FileExistsError(f"output: {settings.output} exists already")
    from vime_trainer.policy import Policy

    policy = Policy.from_config(settings.model_config_file, settings.dtype, settings.seed)
    print(policy.save_hf(settings.output, side_files=settings.tokenizer))
    return 0
