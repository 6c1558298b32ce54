"""Which database the payload files of a blob root belong to: a copied one has the name of the first, and would delete its files.

The root holds a token and the place of the database that it belongs to, and the database holds the token. The token is renewed when
the database is found at another place, so that of two copies only the one that came last owns the files, and the other is told.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import make_url

from vime_buffer._files import BlobFiles
from vime_buffer._store.database import Database, Transaction
from vime_buffer._store.schema import blob_claim
from vime_proto.errors import ContractError


@dataclasses.dataclass(frozen=True)
class Claim:
    """What the file in the blob root says: a token, and path and inode of the database (0: not a file)."""

    token: str
    database: str
    inode: int


def claim_files(files: BlobFiles, database: Database) -> None:
    """Makes the database the owner of its folder in the blob root.

    Raises:
        ContractError: another copy of the database is; nothing was changed.
    """
    place, inode = _place(database.url)
    found = _parse(files.read_claim(), files.claim)
    known = database.run_sync(_tokens)
    if found is not None:
        if found.token not in known:
            raise ContractError(
                "blobs",
                f"the files of {place} belong to another copy of it since that was opened: {_remedy(files, found)}",
            )
        if (found.database, found.inode) == (place, inode):
            return
        if _is_there(found, place):
            raise ContractError(
                "blobs", f"{place} is a copy of a database whose files it would delete: {_remedy(files, found)}"
            )
    token = uuid.uuid4().hex
    # The database accepts both tokens until the file is written, so that a process that dies here can be started again.
    database.run_sync(lambda tx: _store(tx, found.token if found else token, token))
    files.write_claim(json.dumps(dataclasses.asdict(Claim(token, place, inode))).encode())
    database.run_sync(lambda tx: _store(tx, token, token))


def _remedy(files: BlobFiles, found: Claim) -> str:
    return f"give this one a copy of the blob root, or delete {files.claim} if the other ({found.database}) is no longer used"


def _place(url: str) -> tuple[str, int]:
    parsed = make_url(url)
    if not parsed.drivername.startswith("sqlite"):
        return parsed.render_as_string(hide_password=True), 0
    path = Path(parsed.database).resolve()
    return str(path), path.stat().st_ino


def _is_there(found: Claim, place: str) -> bool:
    """Whether the file that claimed is another one than ours, and still where it was."""
    if not found.inode:
        return False
    try:
        there = Path(found.database).stat()
        return there.st_ino == found.inode and not Path(place).samefile(found.database)
    except OSError:
        return False


def _parse(data: bytes | None, name: str) -> Claim | None:
    if data is None:
        return None
    try:
        return Claim(**json.loads(data))
    except (ValueError, TypeError):
        raise ContractError("blobs", f"{name} does not say which database the files belong to") from None


def _tokens(tx: Transaction) -> set[str]:
    row = tx.execute(sa.select(blob_claim.c.token, blob_claim.c.next)).first()
    return set() if row is None else set(row)


def _store(tx: Transaction, token: str, following: str) -> None:
    tx.execute(blob_claim.delete())
    tx.execute(blob_claim.insert().values(id=1, token=token, next=following))
