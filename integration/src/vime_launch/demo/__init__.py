"""The demo: a tiny model learns to carry, by reinforcement learning through all five processes."""

from vime_launch.demo._acceptance import Figures, faults, figures_of
from vime_launch.demo._run import demo
from vime_launch.demo._task import Addition, write_task

__all__ = ["Addition", "Figures", "demo", "faults", "figures_of", "write_task"]
