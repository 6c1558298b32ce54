"""Runs: opening, closing, lineages, published versions."""

from __future__ import annotations

import dataclasses

import grpc
import sqlalchemy as sa

from vime_buffer._rules import Limits
from vime_buffer._store.database import Transaction
from vime_buffer._store.schema import lineages, runs
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.common.v1 import common_pb2
from vime_proto.errors import ContractError, StatusError
from vime_proto.version import LineageTree, check_version, policy_version, show

_DEFAULT_ATTEMPTS = 3
_FIND = sa.select(runs).where(runs.c.run_id == sa.bindparam("run"))


@dataclasses.dataclass(frozen=True)
class Run:
    """The row of a run."""

    run_id: str
    batch_groups: int
    group_size: int
    max_staleness: int
    seed: str | None
    publish_interval: int
    max_attempts: int
    epochs: int | None
    lineage: int
    trained: int
    version: int | None
    rewind_due: bool
    closed: bool
    closed_reason: str
    source_position: int
    source_digest: str
    next_seq: int
    next_ready: int
    next_batch: int
    checkpoint: int | None
    collected: int

    @property
    def limits(self) -> Limits:
        return Limits(self.batch_groups, self.max_staleness, self.publish_interval)


def find(tx: Transaction, run_id: str) -> Run | None:
    """The run, if it was opened."""
    row = tx.execute(_FIND, {"run": run_id}).first()
    return None if row is None else Run(*row)


def get(tx: Transaction, run_id: str) -> Run:
    """The run.

    Raises:
        StatusError: NOT_FOUND.
    """
    run = find(tx, run_id)
    if run is None:
        known = ", ".join(tx.execute(sa.select(runs.c.run_id).order_by(runs.c.run_id).limit(20)).scalars()) or "none"
        raise StatusError(grpc.StatusCode.NOT_FOUND, f"run_id {run_id!r} is not open (open: {known}); call OpenRun")
    return run


def update(tx: Transaction, run_id: str, **values) -> None:
    """Sets columns of a run's row."""
    tx.execute(runs.update().where(runs.c.run_id == run_id).values(**values))


def lineage_tree(tx: Transaction, run_id: str) -> LineageTree:
    """The lineages of a run."""
    rows = tx.execute(
        sa.select(lineages.c.ordinal, lineages.c.parent, lineages.c.forked_at)
        .where(lineages.c.run_id == run_id)
        .order_by(lineages.c.ordinal)
    )
    return LineageTree(common_pb2.Lineage(ordinal=o, parent=p, forked_at=f) for o, p, f in rows)


def add_lineage(tx: Transaction, run_id: str, lineage: common_pb2.Lineage, field: str = "lineage") -> bool:
    """Adds a lineage that starts here; answers False when it is the present one already.

    Raises:
        StatusError: ABORTED, when a later lineage exists: the caller was superseded.
        ContractError: a lineage that does not follow from the known ones.
    """
    tree = lineage_tree(tx, run_id)
    current = tree.current
    if current is not None and lineage.HasField("ordinal") and lineage.ordinal < current:
        raise StatusError(
            grpc.StatusCode.ABORTED, f"{field}: lineage {lineage.ordinal} of run {run_id!r} was superseded by {current}"
        )
    tree.add(lineage)
    if tree.current == current:
        return False
    tx.execute(
        lineages.insert().values(
            run_id=run_id,
            ordinal=lineage.ordinal,
            parent=lineage.parent if lineage.HasField("parent") else None,
            forked_at=lineage.forked_at if lineage.HasField("forked_at") else None,
        )
    )
    return True


def present_lineage(tx: Transaction, run: Run) -> common_pb2.Lineage:
    """The lineage that is trained now."""
    lineage = lineage_tree(tx, run.run_id).get(run.lineage)
    return common_pb2.Lineage(ordinal=run.lineage) if lineage is None else lineage


def settings_of(request: pb.OpenRunRequest) -> dict[str, object]:
    """The columns that OpenRun states."""
    return {
        "batch_groups": request.batch_groups,
        "group_size": request.group_size,
        "max_staleness": request.max_staleness,
        "seed": str(request.seed) if request.HasField("seed") else None,
        "publish_interval": request.publish_interval,
        "max_attempts": request.max_attempts if request.HasField("max_attempts") else _DEFAULT_ATTEMPTS,
        "epochs": request.epochs if request.HasField("epochs") else None,
    }


# What a restore may change: nothing stored depends on it.
_MAY_CHANGE = {"max_staleness", "publish_interval", "max_attempts", "epochs"}


def check_same(run: Run, stated: dict[str, object], restored: bool) -> None:
    """Refuses to take up a run under other settings.

    Raises:
        StatusError: FAILED_PRECONDITION, naming each setting with both values.
    """
    differing = [
        f"{name} is {getattr(run, name)}, not {value}"
        for name, value in stated.items()
        if getattr(run, name) != value and not (restored and name in _MAY_CHANGE)
    ]
    if differing:
        raise StatusError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"run {run.run_id!r} was opened with other settings: {'; '.join(differing)}",
        )


def open_response(tx: Transaction, run: Run, existed: bool, source_rows: int | None) -> pb.OpenRunResponse:
    """The run as it stands. Before a due rewind, ``trained`` is what the new lineage inherits."""
    lineage = present_lineage(tx, run)
    trained = min(run.trained, lineage.forked_at) if run.rewind_due else run.trained
    response = pb.OpenRunResponse(trained=trained, existed=existed, lineage=lineage, source_rows=source_rows)
    if run.version is not None:
        response.version.CopyFrom(policy_version(run.run_id, run.lineage, run.version))
    return response


def publish(tx: Transaction, version: common_pb2.PolicyVersion) -> None:
    """Takes note that engines run a version.

    Raises:
        ContractError: a number above the acked batches, or below the one published.
        StatusError: ABORTED for another lineage than the present one, FAILED_PRECONDITION before a due rewind.
    """
    check_version(version)
    run = get(tx, version.run_id)
    check_present(run, version)
    if run.rewind_due:
        raise rewind_first(run)
    if version.number > run.trained:
        raise ContractError(
            "version.number", f"{show(version)} exceeds the {run.trained} acked batches of run {run.run_id!r}"
        )
    if run.version is not None and version.number < run.version:
        raise ContractError("version.number", f"{show(version)} is below {run.version}, which is published already")
    update(tx, run.run_id, version=version.number)
    tx.changed = True


def check_present(run: Run, version: common_pb2.PolicyVersion) -> None:
    """Refuses a version of another lineage than the present one, with ABORTED: the caller was superseded."""
    if version.lineage != run.lineage:
        raise StatusError(
            grpc.StatusCode.ABORTED, f"version {show(version)} is not of the present lineage {run.lineage}"
        )


def rewind_first(run: Run) -> StatusError:
    """The error of calls that come between OpenRun of a new lineage and its Rewind."""
    return StatusError(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"run {run.run_id!r} opened lineage {run.lineage}; call Rewind with the restored batch first",
    )
