"""The loop's backend on Megatron-core."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from vime_trainer.checkpoint import RunState, load_checkpoint, save_checkpoint
from vime_trainer.optim import Optimizer, StepResult
from vime_trainer.packed import PackedBatch, TokenOutputs
from vime_trainer.policy import Policy

from ._settings import RlSettings


class MegatronBackend:
    """Policy, optimizer and, where the KL needs it, a reference, in one process.

    Raises:
        FileNotFoundError, ValueError: the model's folder, see `Policy.from_hf`.
    """

    def __init__(self, settings: RlSettings):
        self.policy = self._load(settings, replay=settings.r3 == "replay")
        total = None if settings.max_steps is None else settings.max_steps * settings.batch.optimizer_steps
        self.optimizer = Optimizer(self.policy, settings.optimizer, total)
        # Routes of the engine belong to the policy: the reference routes itself.
        self._reference = self._load(settings, replay=False) if settings.algorithm.kl.coefficient > 0 else None
        self.vocab_size: int | None = self.policy.arch.vocab

    @staticmethod
    def _load(settings: RlSettings, replay: bool) -> Policy:
        return Policy.from_hf(
            settings.model,
            dtype=settings.dtype,
            layout=settings.batch.layout,
            recompute=settings.recompute,
            replay=replay,
        )

    def forward(self, batch: PackedBatch, wanted: torch.Tensor) -> TokenOutputs:
        return self.policy.forward(batch, wanted)

    def reference_logprobs(self, batch: PackedBatch, wanted: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self._reference.forward(batch, wanted).logprobs

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> StepResult:
        return self.optimizer.step()

    def hf_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.policy.hf_tensors()

    def export(self, folder: Path) -> None:
        self.policy.save_hf(folder)

    def save(self, root: Path, state: RunState, keep: int) -> Path:
        return save_checkpoint(root, self.policy, self.optimizer, state, keep)

    def restore(self, path: Path) -> RunState:
        return load_checkpoint(path, self.policy, self.optimizer)
