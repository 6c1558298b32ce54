"""How many groups may be under way at once, so that none is too old when it is trained on."""

from __future__ import annotations

import dataclasses

from vime_proto.errors import ContractError


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a run was opened with.

    Attributes:
        batch_groups: groups in a batch.
        max_staleness: most batches that a group may lag behind the weights that it trains.
        publish_interval: batches between two publications.
    """

    batch_groups: int
    max_staleness: int
    publish_interval: int = 1


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Groups under way: prompts on loan, groups that wait, groups in batches that are formed or on loan."""

    leased: int = 0
    ready: int = 0
    batched: int = 0

    @property
    def total(self) -> int:
        return self.leased + self.ready + self.batched


def check_limits(limits: Limits) -> None:
    """Refuses limits under which the loop would stop.

    Raises:
        ContractError: no groups in a batch, or publications so rare that the gate closes before the next one.
    """
    if limits.batch_groups < 1:
        raise ContractError("batch_groups", f"must be at least 1, got {limits.batch_groups}")
    if limits.publish_interval < 1:
        raise ContractError("publish_interval", f"must be at least 1, got {limits.publish_interval}")
    if limits.max_staleness < limits.publish_interval - 1:
        raise ContractError(
            "max_staleness",
            f"publishing every {limits.publish_interval} batches lags up to {limits.publish_interval - 1} batches: "
            f"max_staleness must be at least {limits.publish_interval - 1}, got {limits.max_staleness}",
        )


def capacity(limits: Limits, trained: int, version: int | None, occupancy: Occupancy) -> int:
    """Groups that may be granted now; the gate of AReaL (arXiv:2505.24298), counted in batches.

    Args:
        limits: of the run.
        trained: acked batches.
        version: number last published in the present lineage; None before the first, when nothing is granted.
        occupancy: groups under way.
    """
    if version is None:
        return 0
    batches = limits.max_staleness + 1 - (trained - version)
    return max(0, batches * limits.batch_groups - occupancy.total)


def minimum_number(limits: Limits, trained: int, under_way: int) -> int:
    """Oldest version that may answer a prompt granted behind ``under_way`` other groups.

    Batches leave first in, first out, so the group will be in batch ``trained + under_way // batch_groups``. Within the
    capacity this never exceeds the published version.
    """
    return max(0, trained + under_way // limits.batch_groups - limits.max_staleness)
