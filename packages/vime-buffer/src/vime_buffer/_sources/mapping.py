"""Which fields of a row are the prompt, the answer and the reward's name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from vime_buffer._loading import apply_format
from vime_buffer._sources.jsonl import RowError
from vime_buffer.hooks import MessageFormat
from vime_proto.errors import nearest
from vime_proto.sample.v1 import sample_pb2

_DEFAULT_TEXT_FIELD = "prompt"


@dataclasses.dataclass(frozen=True)
class FieldMapping:
    """How a row becomes a prompt.

    Attributes:
        text_field: field with text, tokenised as it stands.
        messages_field: field with chat messages.
        answer_field: field with the reference answer; absent when None.
        reward_field: field with the reward's name.
        reward: the reward's name for rows without one; empty takes the worker's default.
        hook, hook_name: a message format that makes the input instead.
    """

    text_field: str | None = None
    messages_field: str | None = None
    answer_field: str | None = None
    reward_field: str | None = None
    reward: str = ""
    hook: MessageFormat | None = None
    hook_name: str = ""

    def fill(self, prompt: sample_pb2.Prompt, record: Mapping[str, Any], where: str) -> None:
        """Sets input, answer and reward of a prompt.

        Raises:
            RowError: a field is missing or of another type; names file and line.
            HookError: the message format raised.
        """
        prompt.reward = self.reward
        if self.reward_field is not None:
            prompt.reward = self._text(record, self.reward_field, where)
        if self.answer_field is not None:
            prompt.answer = _as_text(self._get(record, self.answer_field, where))
        if self.hook is not None:
            apply_format(self.hook, self.hook_name, record, where, prompt)
        elif self.messages_field is not None:
            messages = self._get(record, self.messages_field, where)
            if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
                raise RowError(where, f"field {self.messages_field!r} must be a list of chat messages")
            prompt.messages_json = json.dumps(messages, ensure_ascii=False)
        else:
            prompt.text = self._text(record, self.text_field or _DEFAULT_TEXT_FIELD, where)

    def _get(self, record: Mapping[str, Any], name: str, where: str) -> Any:
        if name not in record:
            raise RowError(where, nearest(name, record, "field"))
        return record[name]

    def _text(self, record: Mapping[str, Any], name: str, where: str) -> str:
        value = self._get(record, name, where)
        if not isinstance(value, str) or not value:
            raise RowError(where, f"field {name!r} must be text that is not empty, got {value!r}")
        return value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
