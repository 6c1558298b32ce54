"""Which checkpoints a folder holds. The newest one follows from the folders themselves, so no pointer can be stale."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from vime_trainer.files import PARTIAL

__all__ = ["FORMAT", "STATE", "TENSORS", "CheckpointError", "find_latest", "list_steps", "path_of", "prune"]

FORMAT = 2
STATE = "state.json"
TENSORS = "tensors.json"
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or does not fit the run."""


def path_of(root: str | Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps."""
    return Path(root) / f"step-{step:08d}"


def list_steps(root: str | Path) -> list[int]:
    """Steps of the complete checkpoints, ascending; none when `root` is empty or missing.

    Folders appear under their names only when complete; what a killed process left behind has another name.
    """
    root = Path(root)
    if not root.is_dir():
        return []
    matches = ((_NAME.fullmatch(entry.name), entry) for entry in root.iterdir())
    return sorted(int(match[1]) for match, entry in matches if match and (entry / STATE).is_file())


def find_latest(root: str | Path) -> Path | None:
    """The newest complete checkpoint; None when there is none."""
    steps = list_steps(root)
    return path_of(root, steps[-1]) if steps else None


def prune(root: str | Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints, and what killed processes left behind.

    A folder loses its name first, so that a kill in between leaves no half of a checkpoint under a valid name.
    """
    root = Path(root)
    for step in list_steps(root)[:-keep]:
        old = path_of(root, step)
        old.rename(root / f"{PARTIAL}{old.name}")
    for left in root.glob(f"{PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)
