"""Other ways to round in the trainer, one context manager each, to see which of them is nearer to the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.transformer import attention
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from vime_trainer.fused import switches
from vime_trainer.megatron import _experts, _moe, _norm
from vime_trainer.policy import _layouts

__all__ = ["ENGINE_ORDER", "VARIANTS", "Variant"]

Change = Callable[[Any], AbstractContextManager[Any]]
"""Takes the built model, or None where it acts on building."""


@contextlib.contextmanager
def unfused(model: Any) -> Iterator[None]:
    """Megatron's own order: gates of the activations' type, scatter-add of experts' outputs, roundings between steps."""
    with ExitStack() as stack:
        for switch in ("swiglu", "rope", "dispatch"):
            stack.enter_context(patch.object(switches, switch, False))
        stack.enter_context(patch.object(_moe, "sum_in_float32", lambda layer: None))
        stack.enter_context(patch.object(_moe.Float32GateRouter, "gating", TopKRouter.gating))
        yield


def router_in_float32(model: Any) -> AbstractContextManager[Any]:
    """Logits of the router as one float32 product, not rounded."""

    def gating(self: Any, hidden: Tensor) -> Tensor:
        return hidden.float() @ self.weight.float().t()

    return patch.object(_moe.Float32GateRouter, "gating", gating)


def experts_in_a_loop(model: Any) -> AbstractContextManager[Any]:
    """A product for each expert in place of the grouped one."""
    return patch.object(_experts, "_grouped", _experts._looped)


def weights_after(model: Any) -> AbstractContextManager[Any]:
    """Gates multiply the second product, in float32 with one rounding; the first half rounds silu before it meets up."""

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        if rows.is_cuda and rows.dtype == torch.bfloat16:
            return torch.mm(rows, weight.t(), out_dtype=torch.float32)
        return rows.float() @ weight.float().t()

    def forward(self: Any, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        multiply = _experts._grouped if tokens.is_cuda and tokens.dtype == torch.bfloat16 else _experts._looped
        gate, up = multiply(tokens, self.fc1, tokens_per_expert).chunk(2, -1)
        parts = (silu(gate) * up).split(tokens_per_expert.tolist())
        out = torch.cat([product(part, one) for part, one in zip(parts, self.fc2.unbind(0), strict=True)])
        return (out * probs.float().unsqueeze(-1)).to(tokens.dtype), None

    return patch.object(_experts.StackedExperts, "forward", forward)


def sdpa(model: Any) -> AbstractContextManager[Any]:
    """torch's attention, a sequence at a time, in place of its kernel for packed sequences."""
    return patch.object(_layouts, "needs_dense", lambda device, dtype: True)


@contextlib.contextmanager
def fused_add_norm(model: Any) -> Iterator[None]:
    """A norm sees the sum of branch and residual before it is rounded."""
    before = _norm.RMSNorm.forward

    def forward(self: Any, hidden: Tensor) -> Tensor:
        wide = getattr(hidden, "unrounded", None)
        if wide is None:
            return before(self, hidden)
        return rms_norm(wide, self.weight.shape, self.weight.float(), self.eps).to(hidden.dtype)

    def bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
        def add(branch: tuple[Tensor, Any], residual: Tensor, dropout: float) -> Tensor:
            wide = branch[0].float() + residual.float()
            out = wide.to(residual.dtype)
            out.unrounded = wide  # type: ignore[attr-defined]
            return out

        return add

    with ExitStack() as stack:
        stack.enter_context(patch.object(_norm.RMSNorm, "forward", forward))
        for layer in model.decoder.layers:
            for name in ("self_attn_bda", "mlp_bda"):
                stack.enter_context(patch.object(layer, name, bias_dropout_add))
        yield


@contextlib.contextmanager
def heads_in_float32(model: Any) -> Iterator[None]:
    """Norm of queries and keys and their rotation without a rounding between; sines and cosines rounded as in engines."""
    before, dtype = _norm.RMSNorm.forward, torch.bfloat16

    def forward(self: Any, hidden: Tensor) -> Tensor:
        if hidden.dim() == 4 and hidden.dtype == dtype:  # [tokens, 1, heads, head_dim]: no other norm sees heads
            return rms_norm(hidden.float(), self.weight.shape, self.weight.float(), self.eps)
        return before(self, hidden)

    def rotate(heads: Tensor, angles: Tensor, config: Any = None, **_: Any) -> Tensor:
        width = angles.shape[-1]
        turned, rest = heads[..., :width].float(), heads[..., width:].to(dtype)
        cos, sin = angles.cos().to(dtype).float(), angles.sin().to(dtype).float()
        first, second = turned.chunk(2, -1)
        return torch.cat([(turned * cos + torch.cat([-second, first], -1) * sin).to(dtype), rest], -1)

    with (
        patch.object(switches, "rope", False),
        patch.object(attention, "apply_rotary_pos_emb", rotate),
        patch.object(_norm.RMSNorm, "forward", forward),
    ):
        yield


@dataclass(frozen=True)
class Variant:
    """Changes that are made together.

    Attributes:
        changes: entered in this order.
        builds: the model has to be built under them.
        moe: without meaning for a dense model.
    """

    changes: tuple[Change, ...] = ()
    builds: bool = False
    moe: bool = False

    @contextlib.contextmanager
    def use(self, model: Any) -> Iterator[None]:
        """In force inside, for this model."""
        with ExitStack() as stack:
            for change in self.changes:
                stack.enter_context(change(model))
            yield


ENGINE_ORDER = "all in the engine's order"

VARIANTS = {
    "default": Variant(),
    "unfused, bf16 gates and scatter-add": Variant((unfused,), builds=True),
    "router in float32": Variant((router_in_float32,), moe=True),
    "experts in a loop": Variant((experts_in_a_loop,), moe=True),
    "weights after the second product": Variant((weights_after,), moe=True),
    "sdpa": Variant((sdpa,)),
    "fused add and norm": Variant((fused_add_norm,)),
    "q/k norm and rotary in float32": Variant((heads_in_float32,)),
    ENGINE_ORDER: Variant((weights_after, fused_add_norm, heads_in_float32)),
}
