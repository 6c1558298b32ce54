"""Rows of one file or several as an ordered stream of prompts that can be entered at any position."""

from __future__ import annotations

import bisect
import hashlib
import logging
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from vime_buffer._loading import HookError
from vime_buffer._new_prompt import NewPrompt
from vime_buffer._rules import permutation
from vime_buffer._sources.jsonl import JsonlFile, RowError
from vime_buffer._sources.mapping import FieldMapping
from vime_proto.errors import ContractError
from vime_proto.sample.v1 import sample_pb2
from vime_proto.validate import validate_prompt

log = logging.getLogger(__name__)


class PromptSource:
    """Several data sets, one after the other, or shuffled together.

    The prompt at a position depends on the files, the seed and the position alone, so a number is the whole cursor.

    Args:
        parts: (name, file, mapping) of each data set; names are unique.
    """

    def __init__(self, parts: Sequence[tuple[str, JsonlFile, FieldMapping]]):
        names = [name for name, _, _ in parts]
        for name in names:
            if names.count(name) > 1:
                raise ContractError("prompts.name", f"data set {name!r} is named twice; give each its own name")
        self._parts = list(parts)
        self._ends = list(accumulate(len(file) for _, file, _ in parts))
        self._order = lru_cache(maxsize=2)(permutation)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def digest(self) -> str:
        """Changes with the content of the files and their order."""
        content = "|".join(f"{name}:{file.digest}" for name, file, _ in self._parts)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def check(self) -> None:
        """Makes a prompt of the first row of each data set, so that a wrong mapping fails at the start.

        Raises:
            RowError, HookError: names file and line.
        """
        for part in range(len(self._parts)):
            self._make(part, 0, 0)

    def exhausted(self, position: int, epochs: int | None) -> bool:
        """Whether no prompt is at or after this position."""
        return not len(self) or (epochs is not None and position >= epochs * len(self))

    def read(self, position: int, count: int, seed: int | None, epochs: int | None) -> list[NewPrompt]:
        """Up to ``count`` prompts from ``position`` on; fewer at the end."""
        return [
            self._at(place, seed) for place in range(position, position + count) if not self.exhausted(place, epochs)
        ]

    def _at(self, position: int, seed: int | None) -> NewPrompt:
        epoch, index = divmod(position, len(self))
        row = index if seed is None else int(self._order(len(self), seed, epoch)[index])
        part = bisect.bisect_right(self._ends, row)
        return self._try(part, row - (self._ends[part - 1] if part else 0), epoch)

    def again(self, prompt: sample_pb2.Prompt) -> NewPrompt:
        """Another attempt at a row whose message format raised."""
        names = [name for name, _, _ in self._parts]
        if prompt.dataset not in names:
            return NewPrompt(prompt, False, f"data set {prompt.dataset!r} is no longer configured")
        return self._try(names.index(prompt.dataset), prompt.row, prompt.epoch)

    def _try(self, part: int, row: int, epoch: int) -> NewPrompt:
        try:
            return NewPrompt(self._make(part, row, epoch))
        except (HookError, RowError) as error:
            log.error("a row did not become a prompt: %s", error)
            return NewPrompt(self._bare(part, row, epoch), False, str(error))

    def _bare(self, part: int, row: int, epoch: int) -> sample_pb2.Prompt:
        name = self._parts[part][0]
        return sample_pb2.Prompt(prompt_id=f"{name}-{epoch}-{row}", dataset=name, row=row, epoch=epoch)

    def makes(self, prompt_id: str) -> bool:
        """Whether a row of some epoch has this prompt id."""
        name, *numbers = prompt_id.rsplit("-", 2)
        return len(numbers) == 2 and all(map(str.isdecimal, numbers)) and name in (one for one, _, _ in self._parts)

    def _make(self, part: int, row: int, epoch: int) -> sample_pb2.Prompt:
        _, file, mapping = self._parts[part]
        record, text = file.read(row)
        prompt = self._bare(part, row, epoch)
        prompt.record_json = text
        where = f"{file.path}:{file.line(row)}"
        mapping.fill(prompt, record, where)
        try:
            validate_prompt(prompt)
        except ContractError as error:
            raise RowError(where, str(error)) from error
        return prompt

    def close(self) -> None:
        for _, file, _ in self._parts:
            file.close()
