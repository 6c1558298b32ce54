"""Where batches come from, and the folder format of exported ones."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vime_proto.buffer.v1 import buffer_pb2
from vime_proto.errors import ContractError
from vime_proto.sample.v1 import sample_pb2
from vime_trainer.batch import BatchIndex, index_group

from ._needed import NeededRoutes

_GROUPS = "groups.binpb"
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class LeasedBatch:
    """A batch on loan.

    Attributes:
        lease_id: names the loan.
        index: what it holds.
        group_size: rollouts that a group was meant to have.
        message: the lease as the buffer answered it, from which other ranks derive the index.
    """

    lease_id: str
    index: BatchIndex
    group_size: int
    message: buffer_pb2.LeaseBatchResponse

    @classmethod
    def from_message(cls, message: buffer_pb2.LeaseBatchResponse, group_size: int) -> LeasedBatch:
        """The batch that a buffer lent."""
        index = BatchIndex.from_groups(message.groups, message.batch_id, message.ordinal)
        return cls(message.lease_id, index, group_size, message)


class SampleSource(Protocol):
    """Delivers the content of batches; every rank has one. Called from the training thread."""

    def fetch(
        self, leased: LeasedBatch, samples: Sequence[int] | None = None, routes: NeededRoutes | None = None
    ) -> Mapping[str, sample_pb2.Sample]:
        """Samples by id; those that could not be had are missing.

        Args:
            leased: the batch.
            samples: positions of those wanted; None for all.
            routes: rows and layers whose routes are wanted; None for all. More may come.
        """


class BatchSource(SampleSource, Protocol):
    """Hands out batches; each is acked once it is contained in the weights. Only the leader has one."""

    def lease(self) -> LeasedBatch | None:
        """Waits a while for the next batch; None when there will never be more.

        Raises:
            NotYet: nothing within the wait.
        """

    def ack(self, leased: LeasedBatch) -> int:
        """The batch is contained in the weights; acked batches so far."""

    def nack(self, leased: LeasedBatch, refused: Mapping[str, str]) -> None:
        """The batch was not trained on; reasons by sample id."""


class NotYet(Exception):
    """No batch within the wait."""


def write_batch(folder: Path, index: BatchIndex, samples: Mapping[str, sample_pb2.Sample]) -> Path:
    """Writes a batch to `<folder>/<ordinal>/groups.binpb`: Group messages, each after its length (uint64, little-endian).

    The folder appears whole or not at all.
    """
    target = folder / f"{index.ordinal:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{target.name}.partial"
    with partial.open("wb") as file:
        for group in groups_of(index, samples):
            data = group.SerializeToString(deterministic=True)
            file.write(_LENGTH.pack(len(data)) + data)
        file.flush()
        os.fsync(file.fileno())
    target.mkdir(exist_ok=True)
    os.replace(partial, target / _GROUPS)
    (target / "batch.json").write_text(json.dumps({"batch_id": index.batch_id, "ordinal": index.ordinal}) + "\n")
    return target


def groups_of(index: BatchIndex, samples: Mapping[str, sample_pb2.Sample]) -> list[sample_pb2.Group]:
    """Groups with content, from an index and its samples. Of the prompt only the id is known."""
    groups = [
        sample_pb2.Group(group_id=name, prompt=sample_pb2.Prompt(prompt_id=name, text=name)) for name in index.group_ids
    ]
    rollouts = []
    for r, name in enumerate(index.rollout_ids):
        status = sample_pb2.ROLLOUT_STATUS_COMPLETED
        if index.truncated[r]:
            status = sample_pb2.ROLLOUT_STATUS_TRUNCATED
        elif index.failed[r]:
            status = sample_pb2.ROLLOUT_STATUS_FAILED
        rollout = groups[index.groups[r]].rollouts.add(
            rollout_id=name, attempt=1, status=status, reliable=not index.unreliable[r]
        )
        if index.rewards[r] == index.rewards[r]:
            rollout.reward = index.rewards[r]
        if index.failed[r]:
            rollout.failure.stage, rollout.failure.message = "unknown", "failed before the batch was exported"
        for reward, values in index.named_rewards.items():
            if values[r] == values[r]:
                rollout.rewards[reward] = values[r]
        rollouts.append(rollout)
    for s, name in enumerate(index.sample_ids):
        rollouts[index.sample_rollouts[s]].samples.append(samples[name])
    return groups


def read_groups(path: Path) -> Iterator[sample_pb2.Group]:
    """Reads what `write_batch` wrote.

    Raises:
        ContractError: a file that is cut short or holds something else; names it.
    """
    with path.open("rb") as file:
        while header := file.read(_LENGTH.size):
            size = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else -1
            data = file.read(size) if 0 <= size <= path.stat().st_size else b""
            if len(data) != size:
                raise ContractError("import_batches", f"{path} is cut short or is no file of groups")
            try:
                yield sample_pb2.Group.FromString(data)
            except Exception as error:
                raise ContractError("import_batches", f"{path} holds no Group: {error}") from error


class FolderSource:
    """Exported batches, in the order of their names; for training without a buffer.

    Args:
        folder: holds one folder a batch.
        skip: batches that the restored weights contain already.

    Raises:
        FileNotFoundError: no batch there.
    """

    def __init__(self, folder: Path, skip: int = 0):
        self._folder = folder
        self._paths = sorted(folder.glob(f"*/{_GROUPS}"))
        if not self._paths:
            raise FileNotFoundError(f"import_batches: no */{_GROUPS} in {folder}")
        self._next = skip
        self._read: tuple[str, Sequence[sample_pb2.Group]] = ("", ())

    def lease(self) -> LeasedBatch | None:
        if self._next >= len(self._paths):
            return None
        path = self._paths[self._next]
        groups = self._groups_of(path.parent.name)
        message = buffer_pb2.LeaseBatchResponse(
            lease_id=path.parent.name, batch_id=path.parent.name, ordinal=self._next
        )
        try:
            message.groups.extend(index_group(group) for group in groups)
            return LeasedBatch.from_message(message, max((len(group.rollouts) for group in groups), default=0))
        except ContractError as error:
            raise ContractError("import_batches", f"{path}: {error}") from error

    def fetch(
        self, leased: LeasedBatch, samples: Sequence[int] | None = None, routes: NeededRoutes | None = None
    ) -> Mapping[str, sample_pb2.Sample]:
        groups = self._groups_of(leased.index.batch_id)
        found = {s.sample_id: s for group in groups for rollout in group.rollouts for s in rollout.samples}
        names = leased.index.sample_ids
        return {names[at]: found[names[at]] for at in (range(len(names)) if samples is None else samples)}

    def ack(self, leased: LeasedBatch) -> int:
        self._next += 1
        return self._next

    def nack(self, leased: LeasedBatch, refused: Mapping[str, str]) -> None:
        if not refused:
            return
        named = "; ".join(f"sample {name!r}: {reason}" for name, reason in refused.items())
        raise ContractError("import_batches", f"batch {leased.lease_id}: {named}")

    def _groups_of(self, batch_id: str) -> Sequence[sample_pb2.Group]:
        if self._read[0] != batch_id:
            self._read = (batch_id, list(read_groups(self._folder / batch_id / _GROUPS)))
        return self._read[1]
