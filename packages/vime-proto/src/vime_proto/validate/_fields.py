"""Checks that many messages share. Each raises ContractError that names the field."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import numpy as np

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.tensor import to_numpy
from vime_proto.version import check_version


def text(value: str, field: str) -> str:
    """A text that must not be empty."""
    if not value:
        raise ContractError(field, "must not be empty")
    return value


def present(message, name: str, prefix: str = "", why: str = "must be set; 0 is a value"):
    """The value of a field that must be present."""
    if not message.HasField(name):
        raise ContractError(f"{prefix}{name}", why)
    return getattr(message, name)


def at_least(value: float, least: float, field: str) -> None:
    """A number with a lower bound."""
    if not value >= least:
        raise ContractError(field, f"must be at least {least}, got {value}")


def finite(value: float, field: str, about: str = "") -> None:
    """A number that is neither NaN nor infinite."""
    if not math.isfinite(value):
        raise ContractError(field, f"must be finite, got {value}{about}")


def wait_seconds(message, name: str = "wait_seconds") -> float:
    """Seconds of a long poll; absent stands for 0."""
    value = getattr(message, name)
    if not (math.isfinite(value) and value >= 0):
        raise ContractError(name, f"must be a number of seconds, at least 0, got {value}")
    return value


@contextlib.contextmanager
def naming(about: str) -> Iterator[None]:
    """Adds whose field it is to errors that do not say it."""
    try:
        yield
    except ContractError as error:
        (field, text), *more = [(f, t if about in t else t + about) for f, t in error.violations]
        raise ContractError(field, text, more) from None


def unique(ids: Iterable[str], field: str) -> None:
    """Ids none of which is empty or repeated; `field` holds {} where the position goes."""
    seen: set[str] = set()
    for index, one in enumerate(ids):
        text(one, field.format(index))
        if one in seen:
            raise ContractError(field.format(index), f"{one!r} is repeated")
        seen.add(one)


def token_ids(
    tensor: common.Tensor, field: str, about: str, least: int = 0, vocab_size: int | None = None
) -> np.ndarray:
    """Vocabulary ids, int32 [n], in [0, vocab_size), n >= least."""
    ids = to_numpy(tensor, field, common.DTYPE_INT32, (None,))
    if len(ids) < least:
        raise ContractError(field, f"needs {least} tokens or more, got {len(ids)}{about}")
    if len(ids):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            bad = int(np.argmax((ids < 0) | (ids >= (vocab_size or np.iinfo(np.int32).max))))
            bound = "at least 0" if vocab_size is None else f"in [0, {vocab_size})"
            raise ContractError(field, f"ids must be {bound}; position {bad} holds {int(ids[bad])}{about}")
    return ids


def logprobs(tensor: common.Tensor, field: str, about: str, length: int) -> np.ndarray:
    """Log-probabilities, float32 [length]: finite, at most 0 but for rounding."""
    values = to_numpy(tensor, field, common.DTYPE_FLOAT32, (length,))
    good = np.isfinite(values)
    if not good.all():
        bad = int(np.argmin(good))
        raise ContractError(field, f"must be finite; position {bad} of {length} holds {values[bad]}{about}")
    # A float32 log-softmax may end up slightly above 0.
    if length and float(values.max()) > 1e-3:
        bad = int(values.argmax())
        raise ContractError(field, f"must not be above 0; position {bad} of {length} holds {values[bad]}{about}")
    return values


def version(message, name: str, field: str, about: str = "") -> common.PolicyVersion:
    """A policy version that must be present and whole."""
    if not message.HasField(name):
        raise ContractError(field, f"must be set{about}")
    value = getattr(message, name)
    check_version(value, field)
    return value


def index_range(value: common.IndexRange, field: str, limit: int | None = None) -> tuple[int, int]:
    """[start, stop) with both ends present, start <= stop <= limit."""
    start, stop = present(value, "start", f"{field}."), present(value, "stop", f"{field}.")
    if start > stop:
        raise ContractError(field, f"start {start} is after stop {stop}")
    if limit is not None and stop > limit:
        raise ContractError(field, f"stop {stop} is beyond {limit}")
    return start, stop


def byte_range(value: common.ByteRange, field: str, limit: int | None = None) -> tuple[int, int]:
    """(offset, end) with both fields present, end <= limit."""
    offset, length = present(value, "offset", f"{field}."), present(value, "length", f"{field}.")
    if limit is not None and offset + length > limit:
        raise ContractError(field, f"bytes [{offset}, {offset + length}) lie beyond {limit}")
    return offset, offset + length
