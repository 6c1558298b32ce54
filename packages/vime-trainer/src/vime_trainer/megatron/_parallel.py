"""The process groups of this process: made from a `ParallelConfig`, found again by `parallel()`."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import Any

import torch

from vime_trainer.megatron import _seams
from vime_trainer.megatron._ranks import Parallel
from vime_trainer.ranks import rank, world_size
from vime_trainer.settings.parallel import ParallelConfig

__all__ = ["initialize", "parallel"]

_PATIENCE = timedelta(days=1)
"""How long ranks wait in a host collective: rank 0 may wait as long for its next batch."""

_current: Parallel | None = None
_store: Any = None
_rounds = 0


def parallel() -> Parallel:
    """The present layout; all ranks data parallel when none was asked for."""
    return _current if _current is not None else initialize(ParallelConfig())


def initialize(config: ParallelConfig | None = None) -> Parallel:
    """Creates the process groups; gloo without a GPU, NCCL with one. Collective.

    A process alone needs neither a port nor environment variables: its store lives in memory. Another layout than the
    present one replaces it, and models of the one before can no longer run.

    Args:
        config: the layout; None keeps the present one.

    Raises:
        ValueError: sizes that do not divide WORLD_SIZE.
    """
    global _current
    if _current is not None and (config is None or config == _current.config):
        return _current
    config = config or ParallelConfig()
    config.check_world(world_size())
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    _seams.install()
    if _current is not None:
        _current.barrier()  # nobody may still wait in the groups that are about to go
    _close()
    _open_world()
    _make_groups(config)
    host = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE) if world_size() > 1 else None
    _current = Parallel(config, host)
    return _current


def _open_world() -> None:
    global _store, _rounds
    if _store is None:
        if world_size() == 1:
            _store = torch.distributed.HashStore()
        else:
            _store, _, _ = next(torch.distributed.rendezvous("env://", rank(), world_size()))
        atexit.register(_close)
    _rounds += 1
    # Each round of groups has names of its own in the store.
    store = torch.distributed.PrefixStore(f"vime-{_rounds}", _store)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank(), world_size=world_size())


def _make_groups(config: ParallelConfig) -> None:
    from megatron.core import parallel_state

    with _seams.cuda_names():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor,
            pipeline_model_parallel_size=config.pipeline,
            virtual_pipeline_model_parallel_size=config.virtual if config.virtual > 1 else None,
            context_parallel_size=config.context,
            expert_model_parallel_size=config.expert,
            expert_tensor_parallel_size=config.expert_tensor,
        )
    if torch.cuda.is_available():
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(0, force_reset_rng=True)


def _close() -> None:
    global _current
    from megatron.core import parallel_state

    _current = None
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
