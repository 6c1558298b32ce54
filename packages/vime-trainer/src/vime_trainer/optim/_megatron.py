"""Megatron's settings of gradient accumulation and of its optimizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from vime_trainer.fused import switches
from vime_trainer.settings.optimizer import OptimizerSettings

__all__ = ["choose_kernel", "megatron_config", "wrap"]

log = logging.getLogger(__name__)


def wrap(chunks: Sequence[Any], settings: OptimizerSettings) -> list[Any]:
    """Megatron's DistributedDataParallel around each chunk; forward passes may go on using the chunks themselves."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=settings.distributed, overlap_grad_reduce=False
    )
    return [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]


def megatron_config(settings: OptimizerSettings, dtype: torch.dtype) -> Any:
    """Megatron's OptimizerConfig; clipping, the learning rate and weight decay of vectors are left to `Optimizer`.

    Raises:
        ValueError: host-memory state of a float32 model on a GPU.
    """
    from megatron.core.optimizer import OptimizerConfig

    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        decoupled_weight_decay=settings.kind == "adamw",
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.epsilon,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        clip_grad=0.0,
        use_distributed_optimizer=settings.distributed,
    )
    if settings.cpu_offload and not torch.cuda.is_available():
        log.warning("optimizer.cpu_offload: there is no GPU, so everything is in host memory already")
    elif settings.cpu_offload:
        if dtype == torch.float32:
            raise ValueError("optimizer.cpu_offload: Megatron has it for bfloat16 models alone")
        _offload(config)
    return config


def choose_kernel(inner: torch.optim.Optimizer) -> None:
    """Lets torch's Adam run as one kernel where its parameters are on a GPU; call it before each step.

    The kernel needs no temporary copies of the state. A state that was just restored may have its step counts elsewhere.
    """
    if not isinstance(inner, torch.optim.Adam):
        return
    for group in inner.param_groups:
        fused = switches.adam and all(param.is_cuda for param in group["params"])
        group["fused"], group["foreach"] = fused or None, None
        for param in group["params"]:
            state = inner.state.get(param, {})
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].to(param.device if fused else "cpu", torch.float32)


def _offload(config: Any) -> None:
    """Megatron's hybrid device optimizer. It takes gradients where the precision-aware optimizer leaves them, but with that
    switch on Megatron compares the version of Transformer Engine, and fails where there is none; so it is set afterwards.
    """
    config.optimizer_cpu_offload = True
    config.optimizer_offload_fraction = 1.0
    config.use_torch_optimizer_for_cpu_offload = True
    config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    config.store_param_remainders = False
