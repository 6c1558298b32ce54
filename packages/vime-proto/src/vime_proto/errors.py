"""Errors that cross a boundary: raised by servicers, rendered as rich gRPC errors, read back by clients."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

Violation = tuple[str, str]


class ContractError(ValueError):
    """A message breaks its contract: INVALID_ARGUMENT with one field violation, or several.

    Args:
        field: path of the field, such as ``group.rollouts[2].samples[0].segments[1].generation.logprobs``.
        description: what is wrong, with the id concerned and the valid values.
    """

    def __init__(self, field: str, description: str, more: Sequence[Violation] = ()):
        self.violations: list[Violation] = [(field, description), *more]
        super().__init__("; ".join(f"{name}: {text}" for name, text in self.violations))

    def under(self, prefix: str) -> ContractError:
        """The same error with its fields below ``prefix``."""
        (field, description), *more = [(f"{prefix}.{name}", text) for name, text in self.violations]
        return ContractError(field, description, more)


class StatusError(Exception):
    """A canonical gRPC status other than OK.

    Args:
        code: the status code.
        message: one sentence that names the thing concerned.
        violations: field violations, for INVALID_ARGUMENT.
        retry_after: seconds after which a retry makes sense (RetryInfo), for RESOURCE_EXHAUSTED and UNAVAILABLE.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: Sequence[Violation] = (),
        retry_after: float | None = None,
    ):
        self.code = code
        self.message = message
        self.violations = list(violations)
        self.retry_after = retry_after
        super().__init__(f"{code.name}: {message}")


def to_status(error: ContractError | StatusError) -> status_pb2.Status:
    """The ``google.rpc.Status`` of an error, with BadRequest and RetryInfo details."""
    if isinstance(error, ContractError):
        error = StatusError(grpc.StatusCode.INVALID_ARGUMENT, str(error), error.violations)
    details: list[any_pb2.Any] = []
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for field, description in error.violations:
            bad.field_violations.add(field=field, description=description)
        details.append(_pack(bad))
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=code_pb2.Code.Value(error.code.name), message=error.message, details=details)


def from_rpc_error(error: grpc.RpcError) -> StatusError:
    """Reads code, message, violations and retry delay back from a client's error."""
    status = StatusError(error.code(), error.details() or "")
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for detail in status_pb2.Status.FromString(value).details:
            bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
            if detail.Unpack(bad):
                status.violations += [(v.field, v.description) for v in bad.field_violations]
            elif detail.Unpack(retry):
                status.retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    return status


def describe(error: grpc.RpcError) -> str:
    """One line for people: code, message, and the violations that the message does not state already."""
    status = from_rpc_error(error)
    extra = [f"{field}: {text}" for field, text in status.violations if text not in status.message]
    return f"{status.code.name}: {'; '.join([status.message, *extra])}"


def nearest(name: str, valid: Iterable[str], what: str = "name") -> str:
    """``unknown reward 'exat'; did you mean 'exact'? valid: exact, math``."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {what} {name!r}; {hint}valid: {', '.join(names) or 'none'}"


def _pack(message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
