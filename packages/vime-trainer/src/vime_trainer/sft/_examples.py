"""Rows of JSONL files as token ids with a mask of what is learnt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vime_trainer.settings.sft import DataSettings
from vime_trainer.sft._chat import chat_example

__all__ = ["DataError", "Example", "read_examples"]


class DataError(ValueError):
    """A row cannot be trained on; names file and line."""


@dataclass(frozen=True)
class Example:
    """One row.

    Attributes:
        tokens: int64 [n].
        learnt: bool [n], the tokens whose log-probability is raised.
    """

    tokens: np.ndarray
    learnt: np.ndarray


def read_examples(settings: DataSettings, tokenizer: Any, limit: int) -> tuple[list[Example], int]:
    """All rows of all files.

    Args:
        settings: the `[data]` table.
        tokenizer: a transformers tokenizer.
        limit: longest row in tokens.

    Returns:
        The rows, and how many were dropped for their length.

    Raises:
        DataError: a row that is no JSON object, lacks a field, has no answer or is too long.
        FileNotFoundError: a file is missing.
    """
    examples, dropped = [], 0
    for where, row in _rows(settings.files):
        try:
            ids, learnt = _tokens(row, settings, tokenizer)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
        if len(ids) > limit:
            if settings.too_long == "error":
                raise DataError(f"{where}: {len(ids)} tokens; the limit is {limit} (data.max_tokens, data.too_long)")
            dropped += 1
            continue
        if not any(learnt[1:]):
            raise DataError(f"{where}: no token to learn: the answer is empty")
        examples.append(Example(np.asarray(ids, np.int64), np.asarray(learnt, np.bool_)))
    if not examples:
        raise DataError(f"{', '.join(map(str, settings.files))}: no rows to train on ({dropped} dropped)")
    return examples, dropped


def _rows(files: Iterable[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{file}:{number}"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{where}: not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise DataError(f"{where}: not a JSON object")
                yield where, row


def _tokens(row: dict[str, Any], settings: DataSettings, tokenizer: Any) -> tuple[Sequence[int], Sequence[bool]]:
    if settings.messages_field in row:
        return chat_example(row[settings.messages_field], row.get("tools"), tokenizer, settings.train_turns)
    prompt, response = _text(row, settings.prompt_field), _text(row, settings.response_field)
    if not response:
        raise ValueError(f"{settings.response_field!r} is empty")
    # Encoded apart, as in a rollout the prompt is encoded before anything of the answer exists.
    encode: Callable[..., list[int]] = tokenizer.encode
    before = encode(prompt, add_special_tokens=settings.special_tokens)
    eos = tokenizer.eos_token_id
    if (
        settings.special_tokens
        and eos is not None
        and before
        and before[-1] == eos
        and not prompt.endswith(tokenizer.eos_token)
    ):
        before = before[:-1]  # some tokenizers close every text; the answer goes on here
    after = encode(response, add_special_tokens=False)
    if settings.append_eos:
        if eos is None:
            raise ValueError("the tokenizer has no end token; set data.append_eos = false")
        if after[-1] != eos:
            after = [*after, eos]
    return [*before, *after], [False] * len(before) + [True] * len(after)


def _text(row: dict[str, Any], field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} must be text; the row has {', '.join(sorted(row)) or 'no fields'}")
    return value
