"""Where megatron-core 0.16.1 assumes a GPU or Transformer Engine, and what stands in for them. The only such place.

On a host with a GPU the optimizer and the router's scores are torch's whether Transformer Engine is installed or not, and
the router's count of tokens is not compiled.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["cuda_names", "device", "install"]

with warnings.catch_warnings():
    # Megatron says on import that Apex and Transformer Engine are missing, or that the latter moved some names.
    warnings.simplefilter("ignore")
    import megatron.core.optimizer
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter


def device() -> torch.device:
    """The device that models live on: this process's GPU, or the CPU when there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """Maps `device="cuda"` to the CPU and answers `Tensor.type()` as a GPU tensor would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def cuda_names() -> contextlib.AbstractContextManager[Any]:
    """A context in which Megatron may name CUDA devices although there are none; does nothing where there are.

    Every torch call inside costs a Python call, so only construction and the gradient norm run in it, no forward pass.
    """
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaMeansCpu()


def install() -> None:
    """Puts the stand-ins in place; calling it again changes nothing."""
    # Megatron calls collectives by names that torch is about to drop; every rank would say so.
    warnings.filterwarnings("ignore", ".*torch.distributed.*is deprecated", FutureWarning)
    # Undefined without Transformer Engine, yet read by the router. Its product of float32 scores would be in TF32.
    moe_utils.te_general_gemm = None
    # Transformer Engine's Adam counts steps elsewhere; checkpoints and updates are the same with and without it.
    megatron.core.optimizer.Adam = torch.optim.AdamW
    megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = True
    # The router counts tokens for a bias that is not moved here; compiling that costs more than it saves.
    plain = getattr(TopKRouter._apply_expert_bias, "_torchdynamo_orig_callable", None)
    if plain is not None:
        TopKRouter._apply_expert_bias = plain
    if torch.cuda.is_available():
        return

    from megatron.core.tensor_parallel import random as megatron_random

    def current_device() -> torch.device:
        return torch.device("cpu")

    def synchronize(device: Any = None) -> None:
        """Pipeline send and receive call it."""

    # Transformer Engine's sums over lists of tensors need a GPU.
    for module in (clip_grads, optimizer):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    torch.cuda.current_device = current_device  # type: ignore[assignment]
    torch.cuda.synchronize = synchronize
    # Activation recompute saves and restores the CUDA generator; the CPU's, which it saves too, is the only one here.
    megatron_random._get_cuda_rng_state = lambda *_, **__: None
    megatron_random._set_cuda_rng_state = lambda *_, **__: None
    # Initialisation and dropout fork a CUDA generator state that does not exist here; dropout is 0 in this trainer.
    megatron_random._CUDA_RNG_STATE_TRACKER = _NoRngStates()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


class _NoRngStates:
    """Stands in for CudaRNGStatesTracker."""

    is_inference_rng_tracker = False

    def is_initialized(self) -> bool:
        return True

    def reset(self) -> None:
        """Keeps nothing."""

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: dict[str, Any]) -> None:
        """Keeps nothing."""

    def fork(self, name: str = "") -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
