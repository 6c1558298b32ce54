"""Leases: granted, renewed, ended, lapsed; and the incarnations of their holders."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence

import grpc
import sqlalchemy as sa

from vime_buffer._rules import is_too_old
from vime_buffer._store import counters, prompts
from vime_buffer._store.database import Transaction, chunks
from vime_buffer._store.runs import Run
from vime_buffer._store.schema import BatchState, LeaseKind, Purpose, batches, holders, leases
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.errors import ContractError, StatusError

_FIND = sa.select(leases).where(leases.c.lease_id == sa.bindparam("lease"))
_LAPSED = sa.select(leases.c.lease_id, leases.c.kind, leases.c.target, leases.c.purpose).where(
    leases.c.run_id == sa.bindparam("run"), leases.c.ended == "", leases.c.expires_at <= sa.bindparam("at")
)
_END = leases.update().where(leases.c.lease_id == sa.bindparam("lease")).values(ended=sa.bindparam("why"))
_HOLDER = sa.select(holders.c.incarnation, holders.c.retired).where(
    holders.c.run_id == sa.bindparam("run"),
    holders.c.kind == sa.bindparam("what"),
    holders.c.holder == sa.bindparam("who"),
)


@dataclasses.dataclass(frozen=True)
class Lease:
    """The row of a lease."""

    lease_id: str
    run_id: str
    kind: int
    holder: str
    incarnation: str
    target: str
    purpose: int
    attempt: int
    granted_at: int | None
    expires_at: float
    ended: str


def grant(
    tx: Transaction,
    run: Run,
    kind: LeaseKind,
    holder: str,
    incarnation: str,
    targets: Sequence[tuple[str, Purpose, int]],
    ttl: float,
) -> list[str]:
    """Opens a lease per (target, purpose, attempt) and answers their ids."""
    rows = [
        {
            "lease_id": uuid.uuid4().hex,
            "run_id": run.run_id,
            "kind": int(kind),
            "holder": holder,
            "incarnation": incarnation,
            "target": target,
            "purpose": int(purpose),
            "attempt": attempt,
            "granted_at": run.version,
            "expires_at": tx.now + ttl,
            "ended": "",
        }
        for target, purpose, attempt in targets
    ]
    if rows:
        tx.execute(leases.insert(), rows)
    return [row["lease_id"] for row in rows]


def find_open(tx: Transaction, run_id: str, lease_id: str, kind: LeaseKind) -> Lease:
    """An open lease of this kind.

    Raises:
        StatusError: ABORTED, when it ended, lapsed or never was.
    """
    row = tx.execute(_FIND, {"lease": lease_id}).first()
    return check_open(tx, run_id, lease_id, kind, Lease(*row) if row is not None else None)


def check_open(tx: Transaction, run_id: str, lease_id: str, kind: LeaseKind, lease: Lease | None) -> Lease:
    """The lease, if it is open and of this kind; raises as ``find_open`` does."""
    if lease is None or lease.run_id != run_id or lease.kind != kind:
        known = "unknown"
    elif lease.ended:
        known = lease.ended
    elif lease.expires_at <= tx.now:
        known = "lapsed"
    else:
        return lease
    raise StatusError(grpc.StatusCode.ABORTED, f"lease_id {lease_id!r} of run {run_id!r} is no longer held: {known}")


def end(tx: Transaction, lease_ids: Sequence[str], why: str) -> None:
    """Ends leases; what becomes of their targets is the caller's."""
    for part in chunks(lease_ids):
        tx.execute(leases.update().where(leases.c.lease_id.in_(part)).values(ended=why))


def end_one(tx: Transaction, lease_id: str, why: str) -> None:
    """Ends one lease; what every commit does, hence prepared."""
    tx.execute(_END, {"lease": lease_id, "why": why})


def give_back(tx: Transaction, run_id: str, rows, why: str) -> None:
    """Ends leases and makes their targets available again, at their old places."""
    if not rows:
        return
    end(tx, [row.lease_id for row in rows], why)
    prompts.requeue(tx, run_id, [row.target for row in rows if row.kind == LeaseKind.PROMPT])
    formed = [row.target for row in rows if row.kind == LeaseKind.BATCH]
    if formed:
        tx.execute(
            batches.update()
            .where(batches.c.run_id == run_id, batches.c.batch_id.in_(formed))
            .values(state=int(BatchState.FORMED))
        )
    tx.changed = True


def lapse(tx: Transaction, run_id: str) -> None:
    """Ends what was not renewed in time."""
    rows = tx.execute(_LAPSED, {"run": run_id, "at": tx.now}).all()
    give_back(tx, run_id, rows, "lapsed")
    counters.add(tx, run_id, counters.LAPSED, len(rows))


def end_all(tx: Transaction, run_id: str, why: str) -> None:
    """Ends every lease of a run."""
    give_back(tx, run_id, tx.execute(_open_ones(run_id)).all(), why)


def take_back(tx: Transaction, run_id: str, lease_ids: Sequence[str], why: str) -> None:
    """Ends those of these leases that are open, as if they had never been granted."""
    for part in chunks(lease_ids):
        give_back(tx, run_id, tx.execute(_open_ones(run_id).where(leases.c.lease_id.in_(part))).all(), why)


def _open_ones(run_id: str) -> sa.Select:
    return sa.select(leases.c.lease_id, leases.c.kind, leases.c.target, leases.c.purpose).where(
        leases.c.run_id == run_id, leases.c.ended == ""
    )


def enter(tx: Transaction, run_id: str, kind: LeaseKind, holder: str, incarnation: str) -> None:
    """Notes who asks; a new incarnation ends the leases of the holder's older ones at once.

    Raises:
        ContractError: an empty holder or incarnation.
        StatusError: ABORTED, when a newer incarnation of this holder asked before.
    """
    for name, value in (("holder", holder), ("incarnation", incarnation)):
        if not value or len(value) > 255:
            raise ContractError(name, f"must have 1 to 255 characters, got {len(value)}")
    key = {"run": run_id, "what": int(kind), "who": holder}
    known = {row.incarnation: row.retired for row in tx.execute(_HOLDER, key)}
    if known.get(incarnation) is False:
        return
    if known.get(incarnation):
        raise StatusError(
            grpc.StatusCode.ABORTED,
            f"incarnation {incarnation!r} of holder {holder!r} was replaced by a newer one",
        )
    if known:
        tx.execute(
            holders.update()
            .where(holders.c.run_id == run_id, holders.c.kind == int(kind), holders.c.holder == holder)
            .values(retired=True)
        )
        statement = _open_ones(run_id).where(leases.c.kind == int(kind), leases.c.holder == holder)
        give_back(tx, run_id, tx.execute(statement).all(), "replaced by a newer incarnation of its holder")
    tx.execute(
        holders.insert(),
        {"run_id": run_id, "kind": int(kind), "holder": holder, "incarnation": incarnation, "retired": False},
    )


def renew(tx: Transaction, run: Run, lease_ids: Sequence[str], ttl: float) -> list[int]:
    """Renews leases; one directive each, in order. A lease whose answer would be too old ends here."""
    rows = [
        row
        for part in chunks(lease_ids)
        for row in tx.execute(
            sa.select(leases).where(
                leases.c.lease_id.in_(part),
                leases.c.run_id == run.run_id,
                leases.c.ended == "",
                leases.c.expires_at > tx.now,
            )
        )
    ]
    go_on: set[str] = set()
    for lease in (Lease(*row) for row in rows):
        if lease.purpose == Purpose.TRAIN and lease.kind == LeaseKind.PROMPT and _hopeless(run, lease):
            end(tx, [lease.lease_id], "its answer would be too old")
            counters.add(tx, run.run_id, counters.EXPIRED)
            prompts.fail(tx, run, lease.target, "its answer would have been too old")
        else:
            go_on.add(lease.lease_id)
    for part in chunks(sorted(go_on)):
        tx.execute(leases.update().where(leases.c.lease_id.in_(part)).values(expires_at=tx.now + ttl))
    return [pb.LEASE_DIRECTIVE_CONTINUE if lease_id in go_on else pb.LEASE_DIRECTIVE_ABORT for lease_id in lease_ids]


def _hopeless(run: Run, lease: Lease) -> bool:
    return is_too_old(lease.granted_at, run.trained, run.max_staleness)


def extend_all(tx: Transaction, ttl: float) -> None:
    """Gives every open lease a fresh time to live: while the buffer was down nobody could renew.

    Also where that is shorter: the time to live was configured anew, or the wall clock was set back.
    """
    tx.execute(leases.update().where(leases.c.ended == "").values(expires_at=tx.now + ttl))


def next_expiry(tx: Transaction) -> float | None:
    """When the next lease lapses, in seconds since the epoch; None when none is open."""
    return tx.execute(sa.select(sa.func.min(leases.c.expires_at)).where(leases.c.ended == "")).scalar()


def leased_targets(tx: Transaction, run_id: str, kind: LeaseKind) -> list[str]:
    """Targets of open leases."""
    statement = sa.select(leases.c.target).where(
        leases.c.run_id == run_id, leases.c.ended == "", leases.c.kind == int(kind)
    )
    return list(tx.execute(statement).scalars())


def forget(tx: Transaction, before: float) -> None:
    """Drops the rows of leases that ended long ago."""
    tx.execute(leases.delete().where(leases.c.ended != "", leases.c.expires_at < before))
