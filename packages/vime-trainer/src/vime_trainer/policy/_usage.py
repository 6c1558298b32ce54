"""What the routers of all ranks replayed, brought together for each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from vime_trainer.megatron import Parallel
from vime_trainer.packed import ReplayRows
from vime_trainer.policy._layouts import Prepared

__all__ = ["combine"]


def combine(
    usages: Sequence[Sequence[Any]], items: Sequence[Prepared], moe_layers: Sequence[int], here: Parallel
) -> list[Any]:
    """One vime_r3.megatron.Usage a micro-batch, of all MoE layers and tokens, on every rank of the model replica.

    Collective over a model replica when a micro-batch asks to measure.

    Args:
        usages: of each micro-batch those of this rank's chunks; empty where no routes were replayed.
        items: the micro-batches.
        moe_layers: global numbers of the model's MoE layers.

    Returns:
        None where no routes were replayed.
    """
    alone = here.tensor_size * here.context_size * here.pipeline_size == 1
    return [
        None
        if not isinstance(item.routes, ReplayRows)
        else usages[index][0]
        if alone and len(item.seen) == item.total
        else _add(usages[index], item, moe_layers, here)
        for index, item in enumerate(items[: len(usages)])
    ]


def _add(usages: Sequence[Any], item: Prepared, moe_layers: Sequence[int], here: Parallel) -> Any:
    from vime_r3.megatron import Usage

    if not item.routes.measure:
        return Usage(tuple(moe_layers), item.total)
    # All in one tensor: flips of each layer, then of each token the layers that routed it, that replayed it, whether it
    # flipped in any, and whether its row is inexact.
    sizes = [len(moe_layers), *[item.total] * 4]
    counts = torch.zeros(sum(sizes), dtype=torch.int64, device=item.tokens.device)
    flips, routed, replayed, flipped, inexact = counts.split(sizes)
    real = torch.from_numpy(item.seen >= 0).to(counts.device)
    tokens = torch.from_numpy(item.seen).to(counts.device)[real]
    # A row is counted where its token is routed: of ranks that route the same tokens in the same layers by the first.
    first = here.config.shares_tokens or here.tensor_rank == 0
    for usage in usages if first else ():
        if usage.flips is None:
            continue
        flips[[moe_layers.index(layer) for layer in usage.layer_ids]] += usage.flips
        routed[tokens] += len(usage.layer_ids)
        replayed[tokens] += usage.replayed[real]
        flipped[tokens] += usage.flipped[real].to(torch.int64)
        if usage.inexact is not None:
            inexact[tokens] += usage.inexact.to(counts.device)[real].to(torch.int64)
    for group in _groups(here):
        dist.all_reduce(counts, group=group)
    _check_once(routed, replayed, len(moe_layers))
    return Usage(tuple(moe_layers), item.total, flips, flipped > 0, replayed=replayed, inexact=inexact > 0)


def _check_once(routed: torch.Tensor, replayed: torch.Tensor, layers: int) -> None:
    """All ranks together must have routed every token once in every MoE layer, and replayed it in all of them or none."""
    from vime_r3.megatron import ReplayError

    wrong = (routed != layers) | ((replayed != 0) & (replayed != layers))
    if bool(wrong.any()):
        token = int(torch.nonzero(wrong)[0])
        raise ReplayError(
            f"token {token} of a micro-batch was routed in {int(routed[token])} of {layers} MoE layers on all ranks "
            f"together, and replayed in {int(replayed[token])}: must be all of them once, and all or none"
        )


def _groups(here: Parallel) -> list[Any]:
    from megatron.core import parallel_state

    found = []
    if here.tensor_size * here.pipeline_size > 1:
        found.append(parallel_state.get_model_parallel_group())
    if here.context_size > 1:
        found.append(parallel_state.get_context_parallel_group())
    return found
