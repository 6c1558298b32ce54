"""A conversation as ids: what was sampled stays as sampled, and only what the template adds is tokenised."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from vime_proto.sample.v1 import sample_pb2 as pb
from vime_rollout.worker._tokenizer import Message, Tokenizer

GivenTokens = list[tuple[int, bytes]]


@dataclasses.dataclass
class Step:
    """What comes between two model turns.

    Attributes:
        given: (segment role, int32 ids) in order, to append to the sample; None when the template rewrote what came
            before, so that a new sample begins with ``prompt_ids``.
        prompt_ids: the whole conversation as one rendering, int32 [n]; only when ``given`` is None.
    """

    given: GivenTokens | None
    prompt_ids: np.ndarray | None = None


class Conversation:
    """Messages of a rollout and the text that they were rendered to.

    Args:
        tokenizer: with a chat template.
        messages: the opening messages.
        tools: tool descriptions for the template.
    """

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any] | None = None):
        self._tokenizer = tokenizer
        self._tools = tools
        self.messages = list(messages)
        self.text = tokenizer.render(self.messages, tools=tools)

    def prompt_ids(self) -> np.ndarray:
        """Ids of the present rendering: int32 [n]."""
        return self._tokenizer.encode(self.text)

    def advance(self, sampled: np.ndarray, assistant: Message, observation: Sequence[Message]) -> Step:
        """Adds a model turn and what answers it.

        Args:
            sampled: ids of the turn as they were sampled, int32 [n].
            assistant: the turn as a message.
            observation: messages that answer it.
        """
        self.messages += [assistant, *observation]
        before, self.text = self.text, self._tokenizer.render(self.messages, tools=self._tools)
        ending = int(sampled[-1]) if len(sampled) and self._tokenizer.is_special(int(sampled[-1])) else None
        (content,) = self._tokenizer.decode([sampled if ending is None else sampled[:-1]], skip_special_tokens=False)
        ending_text = "" if ending is None else self._tokenizer.token_text(ending)
        added = _added(self.text, before, content, ending_text)
        if added is None:
            return Step(None, self._tokenizer.encode(self.text))
        return Step(self._split(added, ending_text, ending, observation))

    def _split(self, added: str, ending_text: str, ending: int | None, observation: Sequence[Message]) -> GivenTokens:
        # Tokenised together with the token before it: some tokenizers treat the beginning of a text in their own way.
        encoding = self._tokenizer.encode_with_offsets(ending_text + added)
        ids, skip = np.array(encoding.ids, dtype="<i4"), 0
        if ending is not None and len(ids) and ids[0] == ending:
            skip = 1
        elif ending is not None:
            encoding, ending_text = self._tokenizer.encode_with_offsets(added), ""
            ids = np.array(encoding.ids, dtype="<i4")
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)[skip:] - len(ending_text)
        ids = ids[skip:]
        tool = np.zeros(len(ids), dtype=bool)
        for low, high in _contents(added, observation):
            tool |= (starts >= low) & (starts < high)
        edges = [0, *(np.flatnonzero(tool[1:] != tool[:-1]) + 1).tolist(), len(ids)]
        return [
            (pb.SEGMENT_ROLE_TOOL if tool[low] else pb.SEGMENT_ROLE_TEMPLATE, ids[low:high].tobytes())
            for low, high in itertools.pairwise(edges)
            if high > low
        ]


def _added(after: str, before: str, content: str, ending: str) -> str | None:
    """What a rendering adds after the sampled turn; None when it does not begin with what was there, turn included.

    White space around the turn is the template's to trim: it does not make another conversation of it.
    """
    if not after.startswith(before):
        return None
    rest = after[len(before) :]
    if rest.startswith(content):
        rest = rest[len(content) :]
    elif rest.lstrip().startswith(content.strip()):
        rest = rest.lstrip()[len(content.strip()) :]
    else:
        return None
    if not ending:
        return rest
    trimmed = rest.lstrip()
    if trimmed.startswith(ending):
        return trimmed[len(ending) :]
    # The turn ended with a token that the template does not write there; what it writes follows.
    return rest


def _contents(text: str, observation: Sequence[Message]) -> list[tuple[int, int]]:
    """Where the contents of messages stand in a text, looked for in order."""
    found, position = [], 0
    for message in observation:
        content = message.get("content")
        content = content.strip() if isinstance(content, str) else ""
        start = text.find(content, position) if content else -1
        if start >= 0:
            position = start + len(content)
            found.append((start, position))
    return found
