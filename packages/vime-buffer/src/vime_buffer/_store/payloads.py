"""Rows of samples and blobs: where a payload lies, who owns it, when its file may go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import sqlalchemy as sa

from vime_buffer._store.database import Transaction
from vime_buffer._store.schema import blobs, samples
from vime_proto.errors import ContractError

# Marks an entry of Transaction.delete_after that is a URI below a trace root, not a name below the blob root.
URI_MARK = "uri "

_INSERT = samples.insert()
_TAKEN = sa.select(samples.c.sample_id).where(
    samples.c.run_id == sa.bindparam("run"), samples.c.sample_id.in_(sa.bindparam("ids", expanding=True))
)


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file that was written below the blob root."""

    blob_id: str
    path: str
    length: int


@dataclasses.dataclass(frozen=True)
class SampleRow:
    """A sample as it is stored: each of body and trace lies in the row, in a blob, or (trace only) at a URI."""

    sample_id: str
    size: int
    body: bytes | None = None
    body_file: StoredFile | None = None
    trace: bytes | None = None
    trace_file: StoredFile | None = None
    trace_blob: str = ""
    trace_uri: str = ""


def insert_samples(tx: Transaction, run_id: str, group_id: str, rows: Sequence[SampleRow]) -> None:
    """Adds the samples of a group and takes ownership of their blobs."""
    if not rows:
        return
    tx.execute(
        _INSERT,
        [
            {
                "run_id": run_id,
                "sample_id": row.sample_id,
                "group_id": group_id,
                "body": row.body,
                "body_blob": row.body_file.blob_id if row.body_file else "",
                "trace": row.trace,
                "trace_blob": row.trace_file.blob_id if row.trace_file else row.trace_blob,
                "trace_uri": row.trace_uri,
                "size": row.size,
            }
            for row in rows
        ],
    )
    for row in rows:
        for file in filter(None, (row.body_file, row.trace_file)):
            insert_blob(tx, run_id, file, owner=row.sample_id)
        if row.trace_blob:
            tx.execute(
                blobs.update()
                .where(blobs.c.run_id == run_id, blobs.c.blob_id == row.trace_blob)
                .values(owner=row.sample_id)
            )


def insert_blob(tx: Transaction, run_id: str, file: StoredFile, owner: str = "") -> None:
    """Adds the row of a file that was written."""
    tx.execute(
        blobs.insert(),
        {
            "run_id": run_id,
            "blob_id": file.blob_id,
            "path": file.path,
            "length": file.length,
            "owner": owner,
            "created_at": tx.now,
        },
    )


def find_blob(tx: Transaction, run_id: str, blob_id: str) -> StoredFile | None:
    """A blob's file, if there is one of this id."""
    row = tx.execute(
        sa.select(blobs.c.blob_id, blobs.c.path, blobs.c.length).where(
            blobs.c.run_id == run_id, blobs.c.blob_id == blob_id
        )
    ).first()
    return None if row is None else StoredFile(*row)


def check_blobs(tx: Transaction, run_id: str, wanted: dict[str, str]) -> None:
    """Checks that blobs exist and belong to nobody yet.

    Args:
        wanted: field path by blob id.

    Raises:
        ContractError: one that is unknown or owned by another sample.
    """
    if not wanted:
        return
    rows = tx.execute(
        sa.select(blobs.c.blob_id, blobs.c.owner).where(blobs.c.run_id == run_id, blobs.c.blob_id.in_(wanted))
    )
    owners = {blob_id: owner for blob_id, owner in rows}
    for blob_id, field in wanted.items():
        if blob_id not in owners:
            raise ContractError(field, f"unknown blob {blob_id!r} of run {run_id!r}; upload it with PutBlob first")
        if owners[blob_id]:
            raise ContractError(field, f"blob {blob_id!r} belongs to sample {owners[blob_id]!r} already")


def check_new_samples(tx: Transaction, run_id: str, fields: dict[str, str]) -> None:
    """Checks that no sample of these ids exists.

    Args:
        fields: field path by sample id.
    """
    if not fields:
        return
    for sample_id in tx.execute(_TAKEN, {"run": run_id, "ids": list(fields)}).scalars():
        raise ContractError(fields[sample_id], f"sample_id {sample_id!r} exists in run {run_id!r} already")


def delete_groups_samples(tx: Transaction, run_id: str, group_ids: Sequence[str]) -> None:
    """Deletes the samples of groups, and the blobs that they own; their files go after the commit."""
    if not group_ids:
        return
    owned = sa.select(samples.c.sample_id).where(samples.c.run_id == run_id, samples.c.group_id.in_(group_ids))
    ids = list(tx.execute(owned).scalars())
    delete_blobs_of(tx, run_id, ids)
    uris = sa.select(samples.c.trace_uri).where(
        samples.c.run_id == run_id, samples.c.group_id.in_(group_ids), samples.c.trace_uri != ""
    )
    tx.delete_after += [URI_MARK + uri for uri in tx.execute(uris).scalars()]
    tx.execute(samples.delete().where(samples.c.run_id == run_id, samples.c.group_id.in_(group_ids)))


def delete_blobs_of(tx: Transaction, run_id: str, owners: Sequence[str]) -> None:
    """Deletes the blobs that samples own."""
    for start in range(0, len(owners), 500):
        mine = (blobs.c.run_id == run_id, blobs.c.owner.in_(owners[start : start + 500]))
        tx.delete_after += tx.execute(sa.select(blobs.c.path).where(*mine)).scalars()
        tx.execute(blobs.delete().where(*mine))


def delete_unowned(tx: Transaction, run_id: str, blob_ids: Sequence[str]) -> None:
    """Deletes blobs of a group that was not kept."""
    if blob_ids:
        mine = (blobs.c.run_id == run_id, blobs.c.blob_id.in_(blob_ids), blobs.c.owner == "")
        tx.delete_after += tx.execute(sa.select(blobs.c.path).where(*mine)).scalars()
        tx.execute(blobs.delete().where(*mine))


def delete_abandoned(tx: Transaction, before: float) -> None:
    """Deletes blobs that no commit named in time."""
    old = (blobs.c.owner == "", blobs.c.created_at < before)
    tx.delete_after += tx.execute(sa.select(blobs.c.path).where(*old)).scalars()
    tx.execute(blobs.delete().where(*old))


def known_paths(tx: Transaction) -> set[str]:
    """Every file that a row names."""
    return set(tx.execute(sa.select(blobs.c.path)).scalars())


def stored_bytes(tx: Transaction, run_id: str) -> int:
    """Bytes of the payloads stored now: samples, and blobs that nobody owns yet."""
    in_samples = tx.execute(sa.select(sa.func.sum(samples.c.size)).where(samples.c.run_id == run_id)).scalar() or 0
    unowned = sa.select(sa.func.sum(blobs.c.length)).where(blobs.c.run_id == run_id, blobs.c.owner == "")
    return int(in_samples) + int(tx.execute(unowned).scalar() or 0)
