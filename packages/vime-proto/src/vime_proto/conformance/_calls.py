"""Helpers of the suites: ids, and what a refused call said."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

import grpc
import pytest

from vime_proto.errors import StatusError, from_rpc_error


def new_id(prefix: str = "request") -> str:
    """An id that nothing else uses."""
    return f"{prefix}-{uuid.uuid4().hex}"


class Refusal:
    """What a refused call said; filled when the block ends."""

    status: StatusError


@contextlib.contextmanager
def refused(*codes: grpc.StatusCode, field: str | None = None, names: str | None = None) -> Iterator[Refusal]:
    """The block's call must be refused with one of these codes.

    Args:
        codes: canonical codes, any of which is right.
        field: a BadRequest violation must name a field whose path holds this.
        names: the message must hold this text (an id, a valid value).
    """
    seen = Refusal()
    with pytest.raises(grpc.RpcError) as caught:
        yield seen
    seen.status = from_rpc_error(caught.value)
    assert seen.status.code in codes, (
        f"{seen.status.code.name}: {seen.status.message}; expected {[c.name for c in codes]}"
    )
    if field is not None:
        paths = [path for path, _ in seen.status.violations]
        assert any(field in path for path in paths), f"no violation names {field!r}: {paths}"
    if names is not None:
        assert names in seen.status.message, f"{names!r} is not named by: {seen.status.message}"


INVALID = grpc.StatusCode.INVALID_ARGUMENT
ABORTED = grpc.StatusCode.ABORTED
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXISTS = grpc.StatusCode.ALREADY_EXISTS
DATA_LOSS = grpc.StatusCode.DATA_LOSS
