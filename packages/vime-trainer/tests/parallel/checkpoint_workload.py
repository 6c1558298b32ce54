"""A model is trained under one layout of ranks and handed on, by checkpoint, to others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from workload import micro_batches

from vime_trainer.checkpoint import POLICY, RunState, Saver, Trained, load_models
from vime_trainer.megatron import ParallelConfig
from vime_trainer.optim import Optimizer, OptimizerSettings
from vime_trainer.policy import Policy
from vime_trainer.value import ValueModel

CRITIC = "critic"
SETTINGS = {"learning_rate": 1e-2, "epsilon": 1e-3, "clip_grad_norm": 0.5, "weight_decay": 0.1}


@dataclass(frozen=True)
class Chain:
    """The first layout trains, the others restore what the one before saved and save it again.

    Attributes:
        name: of the chain.
        model: "dense", "tied", "moe" or "glm".
        layouts: sizes of ParallelConfig; "distributed" is the optimizer's.
        dtype: of the model.
        resumed: whether the first layout must also go on exactly after a restart.
        critic: whether a value model with an optimizer of its own is handed on, too.
        start: checkpoint that the first layout restores instead of training.
    """

    name: str
    model: str
    layouts: Sequence[dict[str, Any]]
    dtype: str = "float32"
    resumed: bool = False
    critic: bool = False
    start: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For the command line of a rank."""
        return dict(vars(self))


def make(chain: Chain, layout: dict[str, Any], root: Path) -> dict[str, Trained]:
    """Fresh models and optimizers."""
    parallel = ParallelConfig(**{name: size for name, size in layout.items() if name != "distributed"})
    settings = OptimizerSettings(**SETTINGS, distributed=layout.get("distributed", False))
    models = {POLICY: Policy.from_hf(root / chain.model, chain.dtype, parallel=parallel)}
    if chain.critic:
        models[CRITIC] = ValueModel.from_hf(root / chain.model, chain.dtype, parallel=parallel, head_std=0.1)
    return {name: Trained(model, Optimizer(model, settings)) for name, model in models.items()}


def train(models: dict[str, Trained], step: bool = True) -> float:
    """One step of all models, or the loss alone; the policy's loss of all ranks, on ranks of the last stage."""
    for name, trained in models.items():
        if name != POLICY:
            _train(trained, lambda outputs: outputs.values, step)
    return _train(models[POLICY], lambda outputs: -outputs.logprobs, step)


def _train(trained: Trained, terms: Callable[[Any], torch.Tensor], step: bool) -> float:
    policy, optimizer = trained.policy, trained.optimizer
    here, work = policy.parallel, micro_batches("plain")
    mine = list(range(len(work)))[here.data_rank :: here.data_size]
    total = 0.0

    def loss(index, outputs):
        nonlocal total
        each = terms(outputs)
        value = (each * work[mine[index]][2].to(each.device)).sum()
        total += float(value.detach())
        return value

    optimizer.zero_grad()
    policy.run([work[n][0] for n in mine], [work[n][1] for n in mine], loss)
    if step:
        optimizer.step()
    return float(here.sum_data(np.array([total]))[0])


def run(chain: Chain, root: Path, out: Path) -> list[float | None]:
    """Loss of the next step under each layout; None on ranks that do not know it.

    Each layout saves what it has, unchanged, as step n of `out` before it computes the loss.
    """
    losses, before = [], None if chain.start is None else Path(chain.start)
    for number, layout in enumerate(chain.layouts):
        models = make(chain, layout, root)
        if before is None:
            for _ in range(2):
                train(models)
        else:
            load_models(before, models)
        saver = Saver(out, asynchronous=bool(number % 2))
        saved = saver.save(models, RunState(number))
        loss = train(models, step=False)
        losses.append(loss if models[POLICY].policy.parallel.is_last_stage else None)
        saver.wait()
        before = saved.result()
    return losses


def check_resume(chain: Chain, root: Path, out: Path) -> None:
    """A restored run equals the uninterrupted one bit by bit, random numbers of each rank included.

    Raises:
        AssertionError: it does not.
    """
    models = make(chain, chain.layouts[0], root)
    rank = models[POLICY].policy.parallel.rank
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    train(models)
    path = Saver(out).save(models, RunState(1)).result()
    want = [train(models) for _ in range(2)], torch.rand(3), random.random()
    again = make(chain, chain.layouts[0], root)
    load_models(path, again)
    got = [train(again) for _ in range(2)], torch.rand(3), random.random()
    assert got[0] == want[0] and torch.equal(got[1], want[1]) and got[2] == want[2], (got, want)
    for name, trained in models.items():
        weights = trained.policy.parameters()
        for key, param in again[name].policy.parameters().items():
            assert torch.equal(param, weights[key]), (name, key)
        assert again[name].optimizer.updates == 3
