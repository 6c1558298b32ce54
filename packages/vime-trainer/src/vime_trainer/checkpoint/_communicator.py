"""How ranks tell each other what they wrote: bytes alone, over a group that nothing else uses."""

from __future__ import annotations

import functools
import json
import zlib
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch

from vime_trainer.checkpoint._folders import CheckpointError

__all__ = ["Alone", "Communicator", "communicator", "exchange"]

_PATIENCE = timedelta(hours=2)
"""Ranks write different amounts to file systems of different speed before they meet."""


class Communicator(Protocol):
    """The ranks that write one checkpoint together.

    Attributes:
        rank, size: of this process.
    """

    rank: int
    size: int

    def gather(self, payload: bytes) -> list[bytes]:
        """Payloads of all ranks by rank, on every rank. All ranks call it, in the same order."""


class Alone:
    """A world of one rank."""

    rank, size = 0, 1

    def gather(self, payload: bytes) -> list[bytes]:
        """The payload."""
        return [payload]


class Group:
    """All ranks of the default process group, over a gloo group of its own.

    A background thread may use it while training uses other groups: collectives of different groups do not mix.
    """

    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()
        self._group: Any = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE)

    def gather(self, payload: bytes) -> list[bytes]:
        """Sizes first, then the payloads padded to the longest."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        torch.distributed.all_gather(sizes, torch.tensor([len(payload)]), group=self._group)
        longest = max(1, *(int(size) for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(payload)] = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())
        received = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        torch.distributed.all_gather(received, padded, group=self._group)
        return [value[: int(size)].numpy().tobytes() for value, size in zip(received, sizes, strict=True)]


@functools.lru_cache(maxsize=1)
def _group(world: Any) -> Group:
    return Group()


def communicator() -> Communicator:
    """Of this process; the first call is collective when there are several ranks."""
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return _group(torch.distributed.group.WORLD) if several else Alone()


def exchange(ranks: Communicator, values: dict[str, Any], error: Exception | None) -> list[dict[str, Any]]:
    """JSON values of all ranks by rank; when any of them failed, all ranks raise, so that none waits for another.

    Raises:
        CheckpointError: the error of the first rank that has one.
    """
    payload = {"values": values, "error": str(error) or repr(error) if error is not None else None}
    # Thousands of similar names: a tenth of the bytes.
    answers = ranks.gather(zlib.compress(json.dumps(payload).encode(), 1))
    answers = [json.loads(zlib.decompress(answer)) for answer in answers]
    for rank, answer in enumerate(answers):
        if answer["error"] is not None:
            where = f"rank {rank}: " if ranks.size > 1 else ""
            raise CheckpointError(f"{where}{answer['error']}") from error
    return [answer["values"] for answer in answers]
