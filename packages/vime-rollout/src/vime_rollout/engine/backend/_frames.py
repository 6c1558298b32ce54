"""Routes of several requests as one array, which crosses vLLM's processes far cheaper than an array a request.

A frame is uint8 [bytes]: six int32 words (a mark, requests, layers, top_k, bytes of an id, CRC-32 of the request ids), the rows of
each request as int32 (-1: it has none), and the ids of all of them, one request after the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

_MARK = 0x76726631
_WORDS = 6
_TYPES = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}


def join(requests: Sequence[str], routes: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The frame of ``routes``, each uint8 or uint16 ``[rows, layers, top_k]``; None when nobody has any."""
    present = [one for one in routes if one is not None]
    if not present:
        return None
    _, layers, top_k = present[0].shape
    dtype = present[0].dtype
    counts = [-1 if one is None else len(one) for one in routes]
    rows = sum(map(len, present))
    start = 4 * (_WORDS + len(counts))
    frame = np.empty(start + rows * layers * top_k * dtype.itemsize, dtype=np.uint8)
    words = frame[:start].view(np.int32)
    words[:_WORDS] = (_MARK, len(counts), layers, top_k, dtype.itemsize, _digest(requests))
    words[_WORDS:] = counts
    np.concatenate(present, out=frame[start:].view(dtype).reshape(rows, layers, top_k))
    return frame


def split(requests: Sequence[str], frame: np.ndarray) -> list[np.ndarray | None]:
    """What ``join`` was given, each request's rows in an array of its own, which does not keep the frame.

    Raises:
        RuntimeError: the frame is damaged, or of other requests.
    """
    words = frame[: len(frame) // 4 * 4].view(np.int32)
    if len(words) < _WORDS or words[0] != _MARK:
        raise RuntimeError("a step's routes did not come as they were sent")
    count, layers, top_k, size, digest = words[1:_WORDS].tolist()
    if count != len(requests) or digest != _digest(requests):
        raise RuntimeError(f"a step's routes are of {count} requests in another order than its {len(requests)} outputs")
    counts = words[_WORDS : _WORDS + count].tolist()
    ids = frame[4 * (_WORDS + count) :].view(_TYPES[size]).reshape(-1, layers, top_k)
    found: list[np.ndarray | None] = []
    row = 0
    for rows in counts:
        if rows < 0:
            found.append(None)
            continue
        found.append(ids[row : row + rows].copy())
        row += rows
    return found


def is_frame(routes: np.ndarray | None) -> bool:
    """Whether this is a frame, and not a request's own rows."""
    return routes is not None and routes.ndim == 1


def _digest(requests: Sequence[str]) -> int:
    value = zlib.crc32("\n".join(requests).encode())
    return value - (1 << 32) if value >> 31 else value
