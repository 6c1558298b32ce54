"""Megatron's optimizer around a policy: float32 gradients and, for bfloat16 models, float32 master weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vime_trainer import megatron
from vime_trainer.optim._megatron import choose_kernel, megatron_config, wrap
from vime_trainer.optim._schedule import check_span, learning_rate
from vime_trainer.policy import Transformer
from vime_trainer.settings.optimizer import OptimizerSettings

__all__ = ["Optimizer", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """What one call of `Optimizer.step` did.

    Attributes:
        applied: whether the weights changed; a gradient that is not finite changes nothing.
        learning_rate: of this update.
        grad_norm: norm of the whole gradient before clipping.
        clipped: whether the gradient was scaled down.
    """

    applied: bool
    learning_rate: float
    grad_norm: float
    clipped: bool


class Optimizer:
    """Adam or AdamW. Gradients add up in float32 from `zero_grad` to `step`; the caller scales the loss.

    Making it, `step` and `sharded_state_dict` are collective: all ranks call them.

    Args:
        policy: a Policy, or another Transformer; its chunks are wrapped for gradient accumulation; use it as before.
        settings: the `[optimizer]` table.
        total_updates: updates of the run, for the schedule.

    Attributes:
        updates: updates applied so far. The learning rate follows it, so a skipped step does not advance it.
        skipped: steps skipped since their gradient was not finite.
    """

    def __init__(self, policy: Transformer, settings: OptimizerSettings, total_updates: int | None = None) -> None:
        from megatron.core.optimizer import get_megatron_optimizer

        self.settings = settings
        self.total = settings.total_updates or total_updates
        check_span(settings, self.total)
        self.updates = 0
        self.skipped = 0
        self._policy = policy
        with megatron.cuda_names():
            self._chunks = wrap(policy.chunks, settings)
            self._inner = get_megatron_optimizer(megatron_config(settings, policy.dtype), self._chunks)
        for group in self._inner.param_groups:
            # Megatron marks vectors with wd_mult 0 and leaves it to its scheduler to apply that.
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        self._names = {id(param): name for name, param in policy.parameters().items()}
        for name, param in policy.parameters().items():
            if hasattr(param, "main_param"):
                self._names[id(param.main_param)] = name
        self.zero_grad()

    def zero_grad(self) -> None:
        """Starts a new sum of gradients."""
        # The float32 optimizer leaves param.grad an alias of the sum; the next backward would add to it twice.
        self._inner.zero_grad(set_to_none=True)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def step(self) -> StepResult:
        """Clips the summed gradient and updates the weights, unless the gradient has a NaN or an infinity.

        Sums over data-parallel ranks first. All ranks return the same.
        """
        from megatron.core.distributed import finalize_model_grads

        with torch.no_grad(), megatron.cuda_names():
            finalize_model_grads(self._chunks)
            self._inner.prepare_grads()
            norm = self._agree(float(self._inner.get_grad_norm()))
        rate = learning_rate(self.settings, self.updates + 1, self.total)
        if not math.isfinite(norm):
            self.skipped += 1
            return StepResult(False, rate, norm, False)
        limit = self.settings.clip_grad_norm
        clipped = 0.0 < limit < norm
        if clipped and (grads := self._grads()):
            torch._foreach_mul_(grads, limit / (norm + 1e-6))
        for group in self._inner.param_groups:
            group["lr"] = rate
        for chained in self._inner.chained_optimizers:
            choose_kernel(chained.optimizer)
        with torch.no_grad(), megatron.cuda_names():
            self._inner.step_with_ready_grads()
        self.updates += 1
        return StepResult(True, rate, norm, clipped)

    def _grads(self) -> list[Tensor]:
        """What the coming update reads, in float32."""
        place = "decoupled_grad" if self._inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
        params = [param for chained in self._inner.chained_optimizers for param in chained.get_parameters()]
        found = [getattr(param, place, None) for param in params]
        return [grad for grad in found if grad is not None]

    def _agree(self, norm: float) -> float:
        """The norm of rank 0, or NaN when it is not finite on any rank, so that all ranks decide alike."""
        norms = [float(one[0]) for one in self._policy.parallel.gather(np.array([norm]))]
        return norms[0] if all(math.isfinite(one) for one in norms) else math.nan

    def reload_weights(self) -> None:
        """Takes over weights that were changed from outside, into the master weights where there are any."""
        self._inner.reload_model_params()

    def sharded_state_dict(self, model: dict[str, Any], is_loading: bool = False, **options: Any) -> dict[str, Any]:
        """Megatron's sharded tensors of moments and master weights of this rank.

        Args:
            model: what `policy.sharded_state_dict` returned.
            is_loading: make the state's tensors where there are none yet.
            options: passed on, such as `metadata`.
        """
        with megatron.cuda_names():
            return self._inner.sharded_state_dict(model, is_loading, **options)

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments, step counts and master weights, by "<parameter>.<kind>"; live tensors of this rank, not copies.

        Raises:
            ValueError: with the distributed optimizer, whose ranks hold pieces that are no parameters.
        """
        self._refuse_pieces()
        found = {}
        params = self._policy.parameters()
        for param, state in self._slots():
            name = self._names[id(param)]
            for kind, value in state.items():
                found[f"{name}.{kind}"] = torch.as_tensor(value)
            if param is not params[name]:
                found[f"{name}.master"] = param.detach()
        return found

    def _slots(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Parameters that the optimizer updates, with their state; an empty state before the first update."""
        for chained in self._inner.chained_optimizers:
            for param in chained.get_parameters():
                yield param, chained.optimizer.state[param]

    def _refuse_pieces(self) -> None:
        if self.settings.distributed:
            raise ValueError("optimizer.distributed: its state has no tensors by parameter; use sharded_state_dict")
