"""The loop's backend on Megatron-core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from vime_trainer.algorithms import algorithm_of
from vime_trainer.batch import TokenCost
from vime_trainer.checkpoint import POLICY, RunState, Saver, Trained, load_models
from vime_trainer.optim import Optimizer, StepResult
from vime_trainer.packed import PackedBatch, ReplayRows, TokenOutputs
from vime_trainer.policy import Policy
from vime_trainer.settings.rl import RlSettings
from vime_trainer.value import ValueModel, ValueOutputs

from ._backend import TokenLoss, ValueLoss

CRITIC = "critic"
"""Name of the value model in checkpoints, and of its folder beside the exported policy."""


class MegatronCritic:
    """This rank's part of the value model and its optimizer."""

    def __init__(self, settings: RlSettings):
        critic = settings.critic
        self.model = ValueModel.from_hf(
            critic.model or settings.model,
            dtype=settings.dtype,
            layout=settings.batch.layout,
            recompute=settings.recompute,
            parallel=settings.parallel,
            transformer_engine=settings.transformer_engine,
            head_std=critic.head_std,
            seed=settings.seed,
        )
        steps = critic.optimizer_steps * critic.epochs
        updates = None if settings.max_steps is None else settings.max_steps * steps
        self.optimizer = Optimizer(self.model, critic.optimizer, updates)

    def run(
        self, batches: Sequence[PackedBatch], wanted: Sequence[torch.Tensor], loss: ValueLoss | None = None
    ) -> list[ValueOutputs]:
        return self.model.run(batches, wanted, loss)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> StepResult:
        return self.optimizer.step()


class MegatronBackend:
    """This rank's part of policy, optimizer and, where they are needed, reference and critic. All ranks make one.

    Raises:
        FileNotFoundError, ValueError: the model's folder, see `Policy.from_hf`.
    """

    def __init__(self, settings: RlSettings):
        self.policy = self._load(settings, replay=settings.r3 != "off")
        needs_critic = algorithm_of(settings.algorithm).needs_critic
        warmup = settings.critic.warmup_batches if needs_critic else 0
        self.optimizer = Optimizer(self.policy, settings.optimizer, _updates(settings, warmup))
        self.critic = MegatronCritic(settings) if needs_critic else None
        self._models = {POLICY: Trained(self.policy, self.optimizer)}
        if self.critic is not None:
            self._models[CRITIC] = Trained(self.critic.model, self.critic.optimizer)
        self._asynchronous = settings.checkpoint.asynchronous
        self._saver: Saver | None = None
        # Routes of the engine belong to the policy: the reference routes itself.
        self._reference = self._load(settings, replay=False) if settings.algorithm.kl.coefficient > 0 else None
        self.vocab_size: int | None = self.policy.arch.vocab
        moe = tuple(sorted(self.policy.arch.moe_layers))
        self.moe_layers: tuple[int, ...] | None = moe
        self.routed_layers: tuple[int, ...] | None = tuple(layer for layer in self.policy.layers if layer in moe)
        self.cost: TokenCost | None = TokenCost.of_architecture(self.policy.arch)

    @staticmethod
    def _load(settings: RlSettings, replay: bool) -> Policy:
        return Policy.from_hf(
            settings.model,
            dtype=settings.dtype,
            layout=settings.batch.layout,
            recompute=settings.recompute,
            replay=replay,
            parallel=settings.parallel,
            transformer_engine=settings.transformer_engine,
        )

    def routed_tokens(self, micro_batches: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return self.policy.routed_tokens(micro_batches)

    def run(
        self, batches: Sequence[PackedBatch], wanted: Sequence[torch.Tensor], loss: TokenLoss | None = None
    ) -> list[TokenOutputs]:
        return self.policy.run(batches, wanted, loss)

    @property
    def recorded(self) -> list[ReplayRows | None]:
        return self.policy.recorded

    def run_reference(self, batches: Sequence[PackedBatch], wanted: Sequence[torch.Tensor]) -> list[TokenOutputs]:
        return self._reference.run(batches, wanted)

    def refresh_reference(self, folder: Path) -> None:
        self.policy.save_hf(folder)
        with torch.no_grad():
            for one, other in zip(self._reference.weights().values(), self.policy.weights().values(), strict=True):
                one.copy_(other)

    def load_reference(self, folder: Path) -> None:
        self._reference.load_hf(folder)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> StepResult:
        return self.optimizer.step()

    def hf_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.policy.hf_tensors()

    def export(self, folder: Path) -> None:
        self.policy.save_hf(folder)
        if self.critic is not None:
            self.critic.model.save_hf(folder.with_name(f"{folder.name}-{CRITIC}"))

    def save(self, root: Path, state: RunState, keep: int) -> Future[Path]:
        if self._saver is None:
            self._saver = Saver(root, keep, self._asynchronous)
        return self._saver.save(self._models, state)

    def restore(self, path: Path) -> RunState:
        return load_models(path, self._models)


def _updates(settings: RlSettings, warmup: int) -> int | None:
    """Optimizer steps of the run, for the schedule of the learning rate."""
    if settings.max_steps is None:
        return None
    return max(1, settings.max_steps - warmup) * settings.batch.optimizer_steps
