"""What the loop needs of model, optimizer and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from vime_trainer.batch import TokenCost
from vime_trainer.checkpoint import RunState
from vime_trainer.packed import PackedBatch, ReplayRows, TokenOutputs
from vime_trainer.value import ValueOutputs

TokenLoss = Callable[[int, TokenOutputs], Tensor]
ValueLoss = Callable[[int, ValueOutputs], Tensor]


class StepOutcome(Protocol):
    """What an optimizer step did, as `vime_trainer.optim.StepResult`."""

    applied: bool
    learning_rate: float
    grad_norm: float
    clipped: bool


class Critic(Protocol):
    """The value model under training, with an optimizer of its own. All ranks call it, as the backend."""

    def run(
        self, batches: Sequence[PackedBatch], wanted: Sequence[Tensor], loss: ValueLoss | None = None
    ) -> list[ValueOutputs]:
        """As `Backend.run`: values float32 [T] of the prefix before each token."""

    def zero_grad(self) -> None:
        """Starts a new sum of gradients."""

    def step(self) -> StepOutcome:
        """One optimizer step."""


class Backend(Protocol):
    """The model under training. The loop calls it from one thread.

    With several ranks every method is called on all of them, in the same order.

    Attributes:
        vocab_size: token ids are below it; None when unknown.
        moe_layers: numbers, counted from 0, of the model's MoE layers, which are those of a trace; None when unknown.
        routed_layers: those of them on this rank, which may have none; None stands for all that a trace has.
        cost: what a sequence costs, by its length; None counts tokens.
        critic: None unless the algorithm needs one.
        recorded: after a run over batches with RecordRows, the routes of each on this rank; see `Policy.recorded`.
    """

    recorded: list[ReplayRows | None]
    vocab_size: int | None
    moe_layers: tuple[int, ...] | None
    routed_layers: tuple[int, ...] | None
    cost: TokenCost | None
    critic: Critic | None

    def routed_tokens(self, micro_batches: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """int64: places of the tokens that this rank's routers see in a pass over micro-batches of sequences of these
        lengths, in each packed micro-batch; see `Policy.routed_tokens`."""

    def run(
        self, batches: Sequence[PackedBatch], wanted: Sequence[Tensor], loss: TokenLoss | None = None
    ) -> list[TokenOutputs]:
        """One pass over micro-batches: log-probs and entropies of the tokens where `wanted` (bool [T] each) is True.

        Args:
            batches: the same on all ranks of a model replica, and as many on every data rank.
            loss: called on the last pipeline stage with the number of a micro-batch and its differentiable outputs; the
                scalar that it returns is added, unscaled, to what is differentiated. Without it no gradient arises.

        Returns:
            Detached outputs on the last pipeline stage, nothing on the others.
        """

    def run_reference(self, batches: Sequence[PackedBatch], wanted: Sequence[Tensor]) -> list[TokenOutputs]:
        """As `run` without a loss, by the reference policy, which routes itself."""

    def refresh_reference(self, folder: Path) -> None:
        """Makes the reference what the policy is now, and writes it to a Hugging Face folder."""

    def load_reference(self, folder: Path) -> None:
        """Takes the reference's weights from a Hugging Face folder."""

    def zero_grad(self) -> None:
        """Starts a new sum of gradients."""

    def step(self) -> StepOutcome:
        """One optimizer step; a gradient that is not finite changes nothing."""

    def hf_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Weights under Hugging Face names, layer by layer; of several ranks only the first gets them."""

    def export(self, folder: Path) -> None:
        """Writes a Hugging Face folder."""

    def save(self, root: Path, state: RunState, keep: int) -> Future[Path]:
        """Writes a checkpoint of everything, whole or not at all, and removes all but the newest `keep`.

        Returns:
            Done when the checkpoint is visible; its result is the folder. The model may be trained on meanwhile.
        """

    def restore(self, path: Path) -> RunState:
        """Loads one.

        Raises:
            CheckpointError: missing, damaged, or of another model.
        """
