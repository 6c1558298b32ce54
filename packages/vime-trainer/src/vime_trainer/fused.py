"""Small functions that a GPU runs as one kernel, and the switches that turn each faster way off for measurements."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Switches", "fuse", "switches"]


@dataclass
class Switches:
    """Faster ways; turning one off changes speed and memory, not results beyond rounding.

    Attributes:
        swiglu: gate, up and routing weight of feed-forward parts in one kernel, keeping only its input for backward.
        norm: RMSNorm and its gradients in one kernel each.
        rope: rotary embedding in one kernel, with sines and cosines worked out once a pass.
        dispatch: expert rows by sorted ids and gathers: no scatter with atomic additions, no wait for the GPU.
        logprobs: statistics and gradients of logits in one kernel each.
        adam: torch's fused Adam.
        experts: stacked experts and one grouped product in models of Transformer Engine's layers too, where torch takes their
            widths; off, theirs: a product an expert, whose rows the host waits to learn.
    """

    swiglu: bool = True
    norm: bool = True
    rope: bool = True
    dispatch: bool = True
    logprobs: bool = True
    adam: bool = True
    experts: bool = True


switches = Switches()
"""In force in this process. Change it before the model is built: some are read then."""


def fuse(switch: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: torch.compile where the first tensor argument is on a GPU and the switch is on, as it stands elsewhere.

    A host without a C compiler, which Triton needs, gets one warning and the function as it stands.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = None
        broken = False

        @functools.wraps(function)
        def run(first: Tensor, *rest: Any) -> Any:
            nonlocal compiled, broken
            if broken or not first.is_cuda or not getattr(switches, switch):
                return function(first, *rest)
            if compiled is None:
                _allow_variants()
                compiled = torch.compile(function)
            # Detached, so that it is no variant whether a weight has a gradient at present.
            arguments = [one.detach() if isinstance(one, Tensor) else one for one in (first, *rest)]
            _fix_widths(arguments)
            try:
                return compiled(*arguments)
            except torch._dynamo.exc.TorchDynamoException as error:
                broken = True
                warnings.warn(f"{function.__name__} runs unfused: {error}", RuntimeWarning, stacklevel=2)
                return function(first, *rest)

        run.plain = function  # type: ignore[attr-defined]
        return run

    return decorate


_LIMIT = 64
"""Most variants of one function: by width, element type, strides."""


def _allow_variants() -> None:
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _LIMIT)


def _fix_widths(arguments: Sequence[Any]) -> None:
    """One kernel for each width, whatever the number of rows, instead of a slower one for all widths."""
    for tensor in arguments:
        if isinstance(tensor, Tensor):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
            if tensor.dim() > 1:
                torch._dynamo.mark_static(tensor, tensor.dim() - 1)
