"""megatron-core, unpatched, with what it lacks on the CPU and without Transformer Engine."""

from vime_trainer.megatron._build import build_model, head_weight, routers, weights
from vime_trainer.megatron._parallel import ParallelConfig, initialize
from vime_trainer.megatron._seams import cuda_names, device

__all__ = [
    "ParallelConfig",
    "build_model",
    "cuda_names",
    "device",
    "head_weight",
    "initialize",
    "routers",
    "weights",
]
