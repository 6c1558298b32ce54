"""Checks of expert ids before anything is built on them."""

from __future__ import annotations

import numpy as np

from vime_proto.errors import ContractError

# Words of 8 ids that are checked at a time: every temporary array stays within the second-level cache.
_BLOCK = 16_384


def check_ids(ids: np.ndarray, experts: int, layer_ids: tuple[int, ...], start: int = 0, field: str = "ids") -> None:
    """Checks that every row names ``top_k`` distinct experts of ``[0, experts)``.

    Args:
        ids: unsigned or signed integers ``[rows, layers, top_k]``.
        experts: routed experts of a layer.
        layer_ids: global numbers of the layers, for the message.
        start: number of the first row, for the message.
        field: how errors name the array.

    Raises:
        ContractError: names row, layer and ids.
    """
    if ids.size == 0:
        return
    if ids.dtype.kind == "i" and int(ids.min()) < 0 or int(ids.max()) >= experts:
        row, layer, _ = np.argwhere((ids < 0) | (ids >= experts))[0]
        raise ContractError(
            field,
            f"row {start + row}, layer {layer_ids[layer]}: ids {ids[row, layer].tolist()} are not in [0, {experts})",
        )
    if ids.shape[2] > 1 and _has_duplicates(ids):
        ordered = np.sort(ids, axis=2)
        row, layer = np.argwhere((ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2))[0]
        blank = [layer_ids[index] for index in np.flatnonzero(~ids.any(axis=(0, 2)))]
        if blank:
            raise ContractError(field, f"layers {blank} hold only zeros: dense layers, or routes were not captured")
        raise ContractError(
            field, f"row {start + row}, layer {layer_ids[layer]}: ids {ids[row, layer].tolist()} name an expert twice"
        )


def _has_duplicates(ids: np.ndarray) -> bool:
    rows = ids.reshape(-1, ids.shape[2])
    if rows.dtype == np.uint8 and rows.shape[1] == 8 and rows.flags.c_contiguous:
        return _has_duplicate_bytes(rows.view(np.uint64).reshape(-1))
    return any(
        bool((block[:, first] == block[:, second]).any())
        for block in (np.ascontiguousarray(rows[at : at + _BLOCK]) for at in range(0, len(rows), _BLOCK))
        for first in range(rows.shape[1])
        for second in range(first + 1, rows.shape[1])
    )


def _has_duplicate_bytes(words: np.ndarray) -> bool:
    """Whether any word holds a byte twice: its xor with itself rotated by 1 to 4 bytes then has a zero byte, and so has the
    bytewise minimum of the four."""
    size = min(_BLOCK, len(words))
    least, turned, other = (np.empty(size, dtype=np.uint64) for _ in range(3))
    for at in range(0, len(words), size):
        block = words[at : at + size]
        low, rest = least[: len(block)], other[: len(block)]
        for shift in (8, 16, 24, 32):
            turn = low if shift == 8 else turned[: len(block)]
            np.right_shift(block, np.uint64(shift), out=turn)
            np.left_shift(block, np.uint64(64 - shift), out=rest)
            turn |= rest
            turn ^= block
            if turn is not low:
                np.minimum(low.view(np.uint8), turn.view(np.uint8), out=low.view(np.uint8))
        if not low.view(np.uint8).min():
            return True
    return False
