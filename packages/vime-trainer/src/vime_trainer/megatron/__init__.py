"""megatron-core, unpatched, with what it lacks on the CPU and without Transformer Engine; with it, its layers."""

from vime_trainer.megatron._build import build_chunks, build_model, head_weight, routers, weights
from vime_trainer.megatron._parallel import initialize, parallel
from vime_trainer.megatron._ranks import Coordinates, Parallel
from vime_trainer.megatron._seams import cuda_names, device
from vime_trainer.megatron._transformer_engine import TransformerEngine
from vime_trainer.settings.parallel import ParallelConfig

__all__ = [
    "Coordinates",
    "Parallel",
    "ParallelConfig",
    "TransformerEngine",
    "build_chunks",
    "build_model",
    "cuda_names",
    "device",
    "head_weight",
    "initialize",
    "parallel",
    "routers",
    "weights",
]
