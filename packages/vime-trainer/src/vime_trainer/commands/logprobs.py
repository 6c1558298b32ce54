"""`vime-trainer logprobs`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from vime_proto.settings import Settings, load
from vime_trainer.settings.common import TransformerEngineUse

__all__ = ["LogprobsSettings", "main"]


class LogprobsSettings(Settings):
    """Log-probabilities of given tokens under a model."""

    model: Path = Field(description="Hugging Face folder")
    data: Path = Field(
        description='JSON lines {"tokens": [ids], "temperature": 1.0, "routes": [[[expert ids] a MoE layer] a token]}; routes '
        "of all tokens but the last are replayed, temperature and routes may be left out"
    )
    output: Path | None = Field(None, description="file to write; default: standard output")
    batch_tokens: int = Field(16384, ge=1, description="most tokens in one forward pass")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of weights and activations")
    transformer_engine: TransformerEngineUse = "auto"


def main(argv: Sequence[str], prog: str) -> int:
    """Writes {"logprobs": [...], "entropy": [...]} for each line; the first entry of each is null."""
    settings = load(LogprobsSettings, argv, prog)
    rows = list(_rows(settings.data))
    from vime_trainer.policy import Policy

    policy = Policy.from_hf(settings.model, settings.dtype, transformer_engine=settings.transformer_engine)
    lines = "".join(json.dumps(line) + "\n" for line in _score(policy, rows, settings))
    if settings.output is None:
        sys.stdout.write(lines)
    else:
        from vime_trainer.files import write_text

        write_text(settings.output.absolute(), lines)
    return 0


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        tokens = row.get("tokens") if isinstance(row, dict) else None
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, int) for token in tokens):
            raise ValueError(f"{file}:{number}: tokens must be a list of at least one token id")
        yield row


def _routes(policy: Any, part: list[dict[str, Any]]) -> Any:
    """Routes of a pack; tokens without any route themselves. None when no row brings some.

    Raises:
        ValueError: routes of another shape than the tokens of their row and the model ask for.
    """
    if not any("routes" in row for row in part):
        return None
    import numpy as np

    from vime_trainer.packed import ReplayRows

    layers = policy.attach_replay().layer_ids
    total = sum(len(row["tokens"]) for row in part)
    ids = np.zeros((total, len(layers), policy.arch.top_k), np.int64)
    valid = np.zeros(total, bool)
    start = 0
    for row in part:
        stop = start + len(row["tokens"])
        if "routes" in row and stop - start > 1:
            given, wanted = np.array(row["routes"], np.int64), ids[start : stop - 1].shape
            if given.shape != wanted:
                raise ValueError(f"routes: of shape {list(given.shape)}; the tokens and the model need {list(wanted)}")
            ids[start : stop - 1] = given
            valid[start : stop - 1] = True
        start = stop
    return ReplayRows(ids, valid, layers)


def _score(policy: Any, rows: list[dict[str, Any]], settings: LogprobsSettings) -> Iterator[dict[str, Any]]:
    import torch

    from vime_trainer.packed import pack

    start = 0
    while start < len(rows):
        stop, used = start, 0
        while stop < len(rows) and (stop == start or used + len(rows[stop]["tokens"]) <= settings.batch_tokens):
            used += len(rows[stop]["tokens"])
            stop += 1
        part = rows[start:stop]
        lengths = [len(row["tokens"]) for row in part]
        heat = [float(row.get("temperature", 1.0)) for row in part]
        with torch.no_grad():
            got = policy(pack([row["tokens"] for row in part], heat, _routes(policy, part)))
        for logprobs, entropy in zip(got.logprobs.split(lengths), got.entropy.split(lengths), strict=True):
            yield {"logprobs": [None, *logprobs[1:].tolist()], "entropy": [None, *entropy[1:].tolist()]}
        start = stop
