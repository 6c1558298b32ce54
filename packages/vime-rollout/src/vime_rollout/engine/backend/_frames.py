"""Routes and log-probs of several requests as one array each, which cross vLLM's processes far cheaper than arrays a request.

A frame of routes is uint8 [bytes]: six int32 words (a mark, requests, layers, top_k, bytes of an id, CRC-32 of the request ids),
the rows of each request as int32 (-1: it has none), and the ids of all of them, one request after the other. Joined log-probs are
vLLM's three arrays, rows of one request after the other, and a list of ints: the CRC-32, then each request's rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

_MARK = 0x76726631
_WORDS = 6
_TYPES = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}


def join(requests: Sequence[str], routes: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The frame of ``routes``, each uint8 or uint16 ``[rows, layers, top_k]``; None when nobody has any."""
    present = [one for one in routes if one is not None]
    if not present:
        return None
    frame, ids = _frame(requests, np.array([-1 if one is None else len(one) for one in routes]), present[0])
    np.concatenate(present, out=ids)
    return frame


def take(
    requests: Sequence[str],
    ids: np.ndarray,
    ends: Sequence[int],
    counts: Sequence[int],
    instead: Mapping[int, np.ndarray] = MappingProxyType({}),
) -> np.ndarray | None:
    """What ``join`` makes of the last ``counts`` rows before ``ends`` of ``ids``; who has 0 rows has no routes.

    Args:
        requests: names, for the frame's check.
        ids: ``[rows, layers, top_k]``.
        ends: for each request.
        counts: for each request.
        instead: places of requests whose rows are these.
    """
    stops, lengths = np.array(ends, dtype=np.int64), np.array(counts, dtype=np.int64)
    lengths[lengths == 0] = -1
    plain = lengths > 0
    for place, rows in instead.items():
        lengths[place], plain[place] = len(rows), False
    if lengths.max(initial=-1) < 0:
        return None
    frame, target = _frame(requests, lengths, ids)
    if len(target) == len(lengths) and plain.all():
        # Its out would be copied once more in any other mode.
        ids.take(stops - 1, axis=0, out=target, mode="clip")
        return frame
    taken = np.maximum(lengths, 0)
    starts = np.cumsum(taken) - taken
    some = lengths[plain]
    offsets = np.arange(some.sum()) - np.repeat(np.cumsum(some) - some, some)
    target[np.repeat(starts[plain], some) + offsets] = ids[np.repeat(stops[plain] - some, some) + offsets]
    for place, rows in instead.items():
        target[starts[place] : starts[place] + len(rows)] = rows
    return frame


def _frame(requests: Sequence[str], counts: np.ndarray, like: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A frame without its ids, and the place for them: ``[rows, layers, top_k]`` of the type of ``like``."""
    (_, layers, top_k), dtype = like.shape, like.dtype
    rows = int(np.maximum(counts, 0).sum())
    start = 4 * (_WORDS + len(counts))
    frame = np.empty(start + rows * layers * top_k * dtype.itemsize, dtype=np.uint8)
    words = frame[:start].view(np.int32)
    words[:_WORDS] = (_MARK, len(counts), layers, top_k, dtype.itemsize, _digest(requests))
    words[_WORDS:] = counts
    return frame, frame[start:].view(dtype).reshape(rows, layers, top_k)


def split(requests: Sequence[str], frame: np.ndarray) -> list[np.ndarray | None]:
    """What ``join`` was given, each request's rows in an array of its own, which does not keep the frame.

    Raises:
        RuntimeError: the frame is damaged, or of other requests.
    """
    words = frame[: len(frame) // 4 * 4].view(np.int32)
    if len(words) < _WORDS or words[0] != _MARK:
        raise RuntimeError("a step's routes did not come as they were sent")
    count, layers, top_k, size, digest = words[1:_WORDS].tolist()
    _check("routes", requests, count, digest)
    counts = words[_WORDS : _WORDS + count].tolist()
    ids = frame[4 * (_WORDS + count) :].view(_TYPES[size]).reshape(-1, layers, top_k)
    return [None if rows is None else ids[rows].copy() for rows in _spans(counts)]


def is_frame(routes: np.ndarray | None) -> bool:
    """Whether this is a frame, and not a request's own rows."""
    return routes is not None and routes.ndim == 1


def join_logprobs(
    requests: Sequence[str], logprobs: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, Any] | None]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]] | None:
    """All of ``logprobs`` as one; None when nobody has any.

    Args:
        logprobs: token ids and log-probs, both ``[rows, candidates]``, and ranks ``[rows]``, with as many candidates for everybody.
    """
    present = [one for one in logprobs if one is not None]
    if not present:
        return None
    ids, values, ranks, _ = zip(*present, strict=True)
    counts = [-1 if one is None else len(one[0]) for one in logprobs]
    return np.concatenate(ids), np.concatenate(values), np.concatenate(ranks), [_digest(requests), *counts]


def split_logprobs(
    requests: Sequence[str], joined: tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray] | None]:
    """What ``join_logprobs`` was given, as views.

    Raises:
        RuntimeError: these are other requests.
    """
    ids, values, ranks, (digest, *counts) = joined
    _check("log-probs", requests, len(counts), digest)
    return [None if rows is None else (ids[rows], values[rows], ranks[rows]) for rows in _spans(counts)]


def _spans(counts: Sequence[int]) -> Iterator[slice | None]:
    """Where each request's rows lie; None for -1."""
    end = 0
    for rows in counts:
        if rows < 0:
            yield None
        else:
            yield slice(end, end := end + rows)


def _check(what: str, requests: Sequence[str], count: int, digest: int) -> None:
    if count != len(requests) or digest != _digest(requests):
        raise RuntimeError(f"a step's {what} are of {count} requests in another order than its {len(requests)} outputs")


def _digest(requests: Sequence[str]) -> int:
    value = zlib.crc32("\n".join(requests).encode())
    return value - (1 << 32) if value >> 31 else value
