"""The toy model on several ranks: data ranks add up gradients, the last stage alone computes, the first rank exports."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from toy import Outcome, ToyBackend

from vime_trainer.checkpoint import RunState
from vime_trainer.checkpoint._folders import path_of
from vime_trainer.megatron import parallel


class RankedToy(ToyBackend):
    """One rank's copy; all ranks hold the same weights."""

    def __init__(self, settings=None):
        super().__init__(settings)
        self.here = parallel()

    def run(self, batches, wanted, loss=None):
        return super().run(batches, wanted, loss) if self.here.is_last_stage else []

    def run_reference(self, batches, wanted):
        return super().run_reference(batches, wanted) if self.here.is_last_stage else []

    def step(self) -> Outcome:
        params = list(self.weights.values())
        payload = None
        if self.here.is_last_stage:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            payload = self.here.sum_data(np.concatenate([g.double().flatten().numpy() for g in grads])).tobytes()
        total = torch.from_numpy(np.frombuffer(self.here.from_last_stage(payload), np.float64).copy())
        for p, part in zip(params, total.split([p.numel() for p in params]), strict=True):
            p.grad = part.reshape(p.shape).float()
        return super().step()

    def hf_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return super().hf_tensors() if self.here.is_leader else iter(())

    def export(self, folder: Path) -> None:
        if self.here.is_leader:
            super().export(folder)
        self.here.barrier()

    def save(self, root: Path, state: RunState, keep: int) -> Future[Path]:
        done: Future[Path] = Future()
        if self.here.is_leader:
            done = super().save(root, state, keep)
        else:
            done.set_result(path_of(root, state.step))
        self.here.barrier()
        return done
