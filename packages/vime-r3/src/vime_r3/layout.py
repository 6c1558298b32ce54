"""Rows where a trainer has its tokens: packed sequences, padding, context and sequence parallel shards.

A trace of n tokens has n - 1 rows. The last token of a sample, padding and holes have no row: they route themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vime_proto.errors import ContractError
from vime_r3.trace import Routes

__all__ = ["pack", "take"]


def pack(
    routes: Sequence[Routes | None], tokens: Sequence[int], *, total: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Routes of samples that lie one after the other in a packed sequence.

    Args:
        routes: one entry a sample; None for a sample without routes.
        tokens: tokens of each sample; its routes have tokens - 1 rows.
        total: length of the packed sequence with its padding; default the sum of ``tokens``.

    Returns:
        ids ``[total, layers, top_k]`` (uint8 or uint16) and valid bool ``[total]``.

    Raises:
        ContractError: no sample with routes, rows that do not fit the tokens, samples of different models.
    """
    known = [part for part in routes if part is not None]
    if not known:
        raise ContractError("routes", "at least one sample must have routes")
    if len(routes) != len(tokens):
        raise ContractError("tokens", f"{len(tokens)} lengths for {len(routes)} samples")
    length = sum(tokens) if total is None else total
    if sum(tokens) > length:
        raise ContractError("total", f"{sum(tokens)} tokens do not fit into {length}")
    first = known[0]
    ids = np.zeros((length, *first.ids.shape[1:]), dtype=first.ids.dtype)
    valid = np.zeros(length, dtype=np.bool_)
    at = 0
    for index, (part, count) in enumerate(zip(routes, tokens, strict=True)):
        if part is not None:
            if (part.layer_ids, part.experts, part.ids.shape[2]) != (
                first.layer_ids,
                first.experts,
                first.ids.shape[2],
            ):
                raise ContractError(
                    f"routes[{index}]", "layers, experts or top-k differ from those of the sample before"
                )
            if len(part.ids) != count - 1:
                raise ContractError(
                    f"routes[{index}]", f"has {len(part.ids)} rows for {count} tokens: must be tokens - 1"
                )
            ids[at : at + count - 1] = part.ids
            valid[at : at + count - 1] = part.valid
        at += count
    return ids, valid


def take(ids: np.ndarray, valid: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows in another order, as a parallel layout orders its tokens.

    Args:
        ids: ``[tokens, layers, top_k]``.
        valid: bool ``[tokens]``.
        positions: integers ``[n]``: the token at each place of this rank's shard, or -1 for padding. Whatever places the
            tokens (context parallel halves, sequence parallel shards, padding) places the rows, so both agree.

    Returns:
        ids ``[n, layers, top_k]`` and valid bool ``[n]``.

    Raises:
        ContractError: a position that is no token.
    """
    positions = np.asarray(positions)
    if positions.size and not (-1 <= int(positions.min()) and int(positions.max()) < len(ids)):
        raise ContractError("positions", f"must be -1 (padding) or in [0, {len(ids)})")
    if not len(ids):
        return np.zeros((len(positions), *ids.shape[1:]), dtype=ids.dtype), np.zeros(len(positions), dtype=np.bool_)
    return ids[positions], valid[positions] & (positions >= 0)
