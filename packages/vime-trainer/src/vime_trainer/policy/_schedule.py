"""One pass over micro-batches by Megatron's own schedules, for any number of pipeline stages and model chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vime_trainer import megatron
from vime_trainer.policy._layouts import Prepared

__all__ = ["run_schedule"]

Forward = Callable[[int, int, Prepared], Tensor]


def run_schedule(
    chunks: Sequence[Any],
    items: Sequence[Prepared],
    forward: Forward,
    finish: Callable[[int, Prepared, Tensor], Tensor | None],
    backward: bool,
) -> None:
    """Runs every micro-batch through this rank's chunks. Collective over the ranks of a model replica.

    Args:
        chunks: this rank's part of the model.
        items: micro-batches, the same on all stages; of one length with virtual stages.
        forward: called with the number of the chunk, the number of the micro-batch, and the micro-batch.
        finish: called on the last stage with the number of the micro-batch, the micro-batch and its hidden states;
            returns the loss, or None for one that changes nothing.
        backward: whether losses are differentiated.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    numbers = {id(chunk): number for number, chunk in enumerate(chunks)}

    def step(iterator: Iterator[tuple[int, Prepared]], chunk: Any) -> tuple[Tensor, Any]:
        index, item = next(iterator)
        with _plainly():
            return forward(numbers[id(chunk)], index, item), partial(close, index, item)

    def close(index: int, item: Prepared, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
        with _plainly():
            loss = finish(index, item, hidden)
            nothing = hidden.flatten()[:0].sum().float()
            # Every micro-batch must be differentiated, even if its loss is a constant: other ranks wait for its gradient.
            loss = nothing if loss is None else loss + nothing
            return loss, torch.zeros((), dtype=torch.int32, device=hidden.device), None

    with megatron.cuda_names(), torch.set_grad_enabled(backward):
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(list(enumerate(items))) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(items),
            seq_length=items[0].length,  # read with virtual stages; otherwise stages tell each other
            micro_batch_size=1,
            forward_only=not backward,
        )


def _plainly() -> AbstractContextManager[Any]:
    """Without the cost of `cuda_names`, which only the schedule itself needs, and which there is not on a GPU."""
    return nullcontext() if torch.cuda.is_available() else torch._C.DisableTorchFunction()
