"""One model's checkpoints, and where a run starts from."""

from __future__ import annotations

from pathlib import Path

from vime_trainer.checkpoint._communicator import communicator
from vime_trainer.checkpoint._folders import CheckpointError, find_latest
from vime_trainer.checkpoint._models import Trained
from vime_trainer.checkpoint._restore import restore
from vime_trainer.checkpoint._saver import Saver
from vime_trainer.checkpoint._state import RunState
from vime_trainer.optim import Optimizer
from vime_trainer.policy import Policy
from vime_trainer.settings.checkpoint import CheckpointSettings

__all__ = ["POLICY", "load_checkpoint", "load_models", "save_checkpoint", "start_point"]

POLICY = "policy"
"""Name of the model of checkpoints that hold one model."""


def save_checkpoint(
    root: str | Path, policy: Policy, optimizer: Optimizer, state: RunState, keep: int | None = None
) -> Path:
    """Writes one checkpoint; it is visible only when complete and on disk. All ranks call it.

    Args:
        root: folder of all checkpoints of the run; made when missing.
        policy, optimizer: what is trained.
        state: where the run stands.
        keep: removes all but the newest so many afterwards; None removes nothing.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: a rank could not write; nothing is visible.
    """
    return Saver(root, keep).save({POLICY: Trained(policy, optimizer)}, state).result()


def load_checkpoint(path: str | Path, policy: Policy, optimizer: Optimizer | None = None) -> RunState:
    """Restores what `save_checkpoint` wrote, bit by bit. Without an optimizer only the weights are restored.

    Raises:
        CheckpointError: no such checkpoint, a damaged file, or another model; nothing was changed.
    """
    return load_models(path, {POLICY: Trained(policy, optimizer)})


def load_models(path: str | Path, models: dict[str, Trained]) -> RunState:
    """Restores several models of one checkpoint. All ranks call it.

    Raises:
        CheckpointError: as `load_checkpoint`, or a model that the checkpoint does not hold.
    """
    return restore(path, models, communicator())


def start_point(root: str | Path, settings: CheckpointSettings, target: int | None) -> Path | None:
    """The checkpoint that a run starts from; None starts anew.

    Args:
        root: folder of the run's checkpoints; may be missing, empty, or hold what a killed process left.
        settings: the `[checkpoint]` table.
        target: steps after which the run ends; None has no end.

    Raises:
        CheckpointError: resume = "must" without a checkpoint, "never" with one, or one that is not below the target.
    """
    latest = find_latest(root)
    if latest is None:
        if settings.resume == "must":
            raise CheckpointError(f"checkpoint.resume: must, but {root} holds no complete checkpoint")
        return None
    if settings.resume == "never":
        raise CheckpointError(f"checkpoint.resume: never, but {root} holds {latest.name}; choose another output folder")
    step = int(latest.name.removeprefix("step-"))
    if target is not None and step >= target:
        raise CheckpointError(
            f"{latest} has trained {step} steps already, and the run ends after {target}: nothing is left to do"
        )
    return latest
