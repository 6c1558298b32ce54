"""When the reference becomes the policy, and the folders from which a resumed run takes it back."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from vime_trainer.algorithms import KlSettings

_NAME = re.compile(r"step-(\d{8})")


class ReferenceRefresh:
    """Follows which weights the reference has.

    Args:
        root: folder for the weights of refreshed references.
        settings: the table [algorithm.kl].
        batches: batches that the reference's weights contain; 0 is the model that the run started from.
    """

    def __init__(self, root: Path, settings: KlSettings, batches: int = 0):
        self._root = root
        self._interval = settings.refresh_interval if settings.coefficient > 0 else None
        self.batches = batches
        self._of_checkpoint: dict[int, int] = {}

    def folder(self, batches: int) -> Path:
        """Hugging Face folder of the reference with these weights."""
        return self._root / f"step-{batches:08d}"

    def due(self, trained: int) -> bool:
        """Whether the reference becomes the policy after so many batches."""
        return self._interval is not None and trained % self._interval == 0

    def saving(self, checkpoint: int) -> None:
        """A checkpoint with this reference is begun; it may be there only after the next refresh."""
        self._of_checkpoint[checkpoint] = self.batches

    def prune(self, kept: list[int]) -> None:
        """Removes references that no checkpoint needs: neither these, which remain, nor a newer one that was begun."""
        newest = max(kept, default=-1)
        coming = [batches for step, batches in self._of_checkpoint.items() if step > newest]
        needed = [self._of_checkpoint.get(step, 0) for step in kept] + coming
        oldest = min(needed, default=self.batches)
        for folder in self._root.glob("step-*"):
            found = _NAME.fullmatch(folder.name)
            if found and int(found[1]) < oldest:
                shutil.rmtree(folder, ignore_errors=True)
