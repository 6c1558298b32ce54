"""What the router needs to know of a call, from its metadata alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vime_proto import metadata as keys
from vime_proto.common.v1 import common_pb2
from vime_proto.errors import ContractError
from vime_proto.version import parse

# Belongs to the caller's connection or to gRPC itself, hence not to the engine's call.
_OWN = {keys.AUTHORIZATION, "user-agent", "content-type", "te", "host", "accept-encoding"}
_FIRST_FIELD_TEXT = 0x0A


@dataclass(frozen=True, slots=True)
class Request:
    """One Generate or Score call.

    Attributes:
        request_id: empty when unknown.
        estimated_tokens: prompt and response; 0 when unknown.
        minimum_version: lowest version that may answer, if stated.
        metadata: what is passed on to the engine.
    """

    request_id: str
    estimated_tokens: int
    minimum_version: common_pb2.PolicyVersion | None
    metadata: tuple[tuple[str, str | bytes], ...]


def read_request(metadata: Iterable[tuple[str, str | bytes]] | None, message: bytes) -> Request:
    """Reads a call's metadata; without a request id there, the message's first field.

    Raises:
        ContractError: a metadata value of another form, naming the key.
    """
    passed = tuple(
        (key, value) for key, value in metadata or () if key not in _OWN and not key.startswith(("grpc-", ":"))
    )
    given = dict(passed)
    tokens = str(given.get(keys.ESTIMATED_TOKENS, "0"))
    if not (tokens.isascii() and tokens.isdigit() and len(tokens) < 16):
        raise ContractError(keys.ESTIMATED_TOKENS, f"must be a decimal integer, got {tokens!r}")
    minimum = given.get(keys.MINIMUM_VERSION)
    return Request(
        request_id=str(given.get(keys.REQUEST_ID, "")) or _first_field(message),
        estimated_tokens=int(tokens),
        minimum_version=parse(str(minimum)) if minimum else None,
        metadata=passed,
    )


def _first_field(message: bytes) -> str:
    """Field 1 of a message, when it is a text below 128 bytes that stands first: GenerateRequest.request_id."""
    if len(message) < 2 or message[0] != _FIRST_FIELD_TEXT or message[1] > 127:
        return ""
    return message[2 : 2 + message[1]].decode("utf-8", errors="replace")
