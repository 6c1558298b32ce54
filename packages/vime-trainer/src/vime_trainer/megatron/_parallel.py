"""How the model and the batch are spread over ranks, and the process groups for it."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass, fields

import torch

from vime_trainer.megatron import _seams

__all__ = ["ParallelConfig", "initialize", "rank", "world_size"]


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel dimensions; the rest of the world is data parallel.

    Raises:
        ValueError: a size that this version does not support.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if size != 1:
                raise ValueError(f"parallel.{field.name}: {size} is not supported by this version; valid: 1")


def rank() -> int:
    """This process's rank, from RANK as torchrun sets it; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of trainer processes, from WORLD_SIZE as torchrun sets it; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _close() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def initialize(config: ParallelConfig | None = None) -> None:
    """Creates the process groups once per process; gloo without a GPU, NCCL with one.

    A process alone needs neither a port nor environment variables: its store lives in memory.

    Raises:
        ValueError: WORLD_SIZE is not 1, which this version does not support.
    """
    from megatron.core import parallel_state

    config = config or ParallelConfig()
    if world_size() != 1:
        raise ValueError(f"WORLD_SIZE: {world_size()} trainer processes are not supported by this version; valid: 1")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    _seams.install()
    if not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=rank(), world_size=world_size())
        atexit.register(_close)
    if not parallel_state.model_parallel_is_initialized():
        with _seams.cuda_names():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=config.tensor,
                pipeline_model_parallel_size=config.pipeline,
                context_parallel_size=config.context,
                expert_model_parallel_size=config.expert,
            )
        if torch.cuda.is_available():
            from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(0)
