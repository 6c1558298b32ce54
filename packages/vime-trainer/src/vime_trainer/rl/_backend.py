"""What the loop needs of model, optimizer and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from vime_trainer.checkpoint import RunState
from vime_trainer.packed import PackedBatch, TokenOutputs


class StepOutcome(Protocol):
    """What an optimizer step did, as `vime_trainer.optim.StepResult`."""

    applied: bool
    learning_rate: float
    grad_norm: float
    clipped: bool


class Backend(Protocol):
    """The model under training. The loop calls it from one thread.

    Attributes:
        vocab_size: token ids are below it; None when unknown.
    """

    vocab_size: int | None

    def forward(self, batch: PackedBatch, wanted: Tensor) -> TokenOutputs:
        """Log-probs and entropies of the tokens where `wanted` (bool [T]) is True; differentiable."""

    def reference_logprobs(self, batch: PackedBatch, wanted: Tensor) -> Tensor:
        """float32 [T] of the model that the run started from, routing itself; without a gradient."""

    def zero_grad(self) -> None:
        """Starts a new sum of gradients."""

    def step(self) -> StepOutcome:
        """One optimizer step; a gradient that is not finite changes nothing."""

    def hf_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Weights under Hugging Face names, layer by layer."""

    def export(self, folder: Path) -> None:
        """Writes a Hugging Face folder."""

    def save(self, root: Path, state: RunState, keep: int) -> Path:
        """Writes a checkpoint of everything, whole or not at all, and removes all but the newest `keep`."""

    def restore(self, path: Path) -> RunState:
        """Loads one.

        Raises:
            CheckpointError: missing, damaged, or of another model.
        """
