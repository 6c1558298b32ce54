"""How a rank's routers chose in a pass, brought together so that the same rank can replay it in any other cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vime_trainer.megatron import Parallel
from vime_trainer.packed import ReplayRows
from vime_trainer.policy._layouts import Prepared

__all__ = ["gather_choice"]


def gather_choice(
    choices: Sequence[tuple[Sequence[int], Sequence[Tensor]]],
    item: Prepared,
    experts: int,
    top_k: int,
    here: Parallel,
) -> ReplayRows:
    """The choice for all tokens of a micro-batch in this rank's layers. Collective over ranks that share its tokens.

    Args:
        choices: of each chunk of this rank, global layer numbers and for each int64 [tokens, top_k].
        item: the micro-batch.
        experts: of a layer.
        top_k: experts of a token.

    Returns:
        Routes of every token of the batch, the last ones of sequences too; of no layers where this rank has no router.
    """
    layers = [layer for numbers, _ in choices for layer in numbers]
    if not layers:
        return ReplayRows(np.zeros((item.total, 0, top_k), np.uint8), np.ones(item.total, bool), ())
    mine = torch.stack([ids for _, found in choices for ids in found], dim=1)
    # Experts count from 1 here, so that a token nobody computed shows.
    whole = torch.zeros(item.total, *mine.shape[1:], dtype=torch.int32, device=mine.device)
    real = torch.from_numpy(item.seen >= 0).to(mine.device)
    whole[torch.from_numpy(item.seen).to(mine.device)[real]] = mine[real].to(torch.int32) + 1
    for group in _token_groups(here):
        dist.all_reduce(whole, group=group)
    ids = whole.cpu().numpy() - 1
    order = np.argsort(layers, kind="stable")
    kind = np.uint8 if experts <= 256 else np.uint16
    return ReplayRows(ids[:, order].astype(kind), (ids >= 0).all(axis=(1, 2)), tuple(np.array(layers)[order].tolist()))


def _token_groups(here: Parallel) -> list[dist.ProcessGroup]:
    """Groups of ranks that have the same layers and other tokens."""
    from megatron.core import parallel_state

    found = []
    if here.config.shares_tokens:
        found.append(parallel_state.get_tensor_model_parallel_group())
    if here.context_size > 1:
        found.append(parallel_state.get_context_parallel_group())
    return found
