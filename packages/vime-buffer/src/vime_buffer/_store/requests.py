"""Answers by request id, kept in rows: a repeated request gets its first answer, also after a restart."""

from __future__ import annotations

import hashlib
from typing import TypeVar

import grpc
import sqlalchemy as sa
from google.protobuf.message import Message

from vime_buffer._store.database import Transaction
from vime_buffer._store.schema import requests
from vime_proto.errors import ContractError, StatusError

Response = TypeVar("Response", bound=Message)

_FIND = sa.select(requests.c.digest, requests.c.response).where(
    requests.c.run_id == sa.bindparam("run"),
    requests.c.method == sa.bindparam("name"),
    requests.c.request_id == sa.bindparam("request"),
)
_INSERT = requests.insert()


def fingerprint(request: Message) -> bytes:
    """Digest of a request's payload."""
    return hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest()


def check_request_id(request_id: str) -> None:
    """Raises ContractError for an empty or overlong id."""
    if not request_id:
        raise ContractError("request_id", "must not be empty")
    if len(request_id) > 255:
        raise ContractError("request_id", f"at most 255 characters, got {len(request_id)}")


def recall(
    tx: Transaction, run_id: str, method: str, request_id: str, digest: bytes, response: type[Response]
) -> Response | None:
    """The first answer to this request; None when it is new.

    Raises:
        StatusError: INVALID_ARGUMENT, when the id came with another payload.
    """
    row = tx.execute(_FIND, {"run": run_id, "name": method, "request": request_id}).first()
    if row is None:
        return None
    if row.digest != digest:
        message = f"request_id {request_id!r} was used with another payload"
        raise StatusError(grpc.StatusCode.INVALID_ARGUMENT, message, [("request_id", message)])
    return response.FromString(row.response)


def remember(tx: Transaction, run_id: str, method: str, request_id: str, digest: bytes, response: Message) -> None:
    """Keeps an answer, in the same transaction as what it answers for."""
    tx.execute(
        _INSERT,
        {
            "run_id": run_id,
            "method": method,
            "request_id": request_id,
            "digest": digest,
            "response": response.SerializeToString(),
            "created_at": tx.now,
        },
    )


def take_out(tx: Transaction, run_id: str, method: str, request_id: str) -> bytes | None:
    """Forgets the answer to one request, and answers it serialised; None when there is none."""
    kept = tx.execute(_FIND, {"run": run_id, "name": method, "request": request_id}).first()
    mine = (requests.c.run_id == run_id, requests.c.method == method, requests.c.request_id == request_id)
    tx.execute(requests.delete().where(*mine))
    return None if kept is None else kept.response


def forget(tx: Transaction, before: float) -> None:
    """Drops answers given before ``before``."""
    tx.execute(requests.delete().where(requests.c.created_at < before))
