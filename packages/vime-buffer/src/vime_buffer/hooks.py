"""User logic by import path: what a hook takes and gives.

A hook is named in the configuration as ``"module:function"``. It runs in the buffer's process, in a thread, and may be called
from several threads. When it raises, the error names the row or the group, the prompt is tried again, and the service stays up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from vime_proto.sample.v1 import sample_pb2

Messages = Sequence[Mapping[str, Any]]


@runtime_checkable
class MessageFormat(Protocol):
    """Makes a prompt's input of a data row."""

    def __call__(self, record: Mapping[str, Any]) -> str | Messages | sample_pb2.Prompt:
        """The input of the prompt.

        Args:
            record: the row as a JSON object.

        Returns:
            Text (tokenised as it stands), or chat messages (rendered by the model's template), or a Prompt, whose input, answer,
            reward, sampling and group_size are taken while its id and origin are set by the buffer.
        """


@dataclasses.dataclass(frozen=True)
class FilterDecision:
    """Whether a group is trained on.

    Attributes:
        keep: False drops it; its prompt is done.
        reason: short name of the reason, counted by name; needed when it is dropped.
    """

    keep: bool
    reason: str = ""


KEEP = FilterDecision(True)


def drop(reason: str) -> FilterDecision:
    """A decision to drop, with its reason."""
    return FilterDecision(False, reason)


@runtime_checkable
class GroupFilter(Protocol):
    """Decides whether a finished group is trained on."""

    def __call__(self, group: sample_pb2.Group) -> FilterDecision:
        """The decision on a whole group: it is kept or dropped as one.

        Args:
            group: prompt and rollouts as committed; do not change it.
        """


__all__ = ["KEEP", "FilterDecision", "GroupFilter", "MessageFormat", "drop"]
