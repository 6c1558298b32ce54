"""What a run needs before it runs: parameters, memory a GPU and arithmetic a step, for one layout. Nothing is built."""

from vime_trainer.plan._activations import GPU_KERNELS, Kernels
from vime_trainer.plan._layout import Layout
from vime_trainer.plan._plan import CriticWorkload, Plan, StageMemory, Workload, make_plan
from vime_trainer.plan._table import render

__all__ = [
    "GPU_KERNELS",
    "CriticWorkload",
    "Kernels",
    "Layout",
    "Plan",
    "StageMemory",
    "Workload",
    "make_plan",
    "render",
]
