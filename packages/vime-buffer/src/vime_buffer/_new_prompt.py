"""What a source gives to the store."""

from __future__ import annotations

import dataclasses

from vime_proto.sample.v1 import sample_pb2


@dataclasses.dataclass(frozen=True)
class NewPrompt:
    """A prompt to insert; ``formatted`` is False when the message-format hook raised on its row."""

    prompt: sample_pb2.Prompt
    formatted: bool = True
    reason: str = ""
