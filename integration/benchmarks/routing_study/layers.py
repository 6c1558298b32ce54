"""Layer by layer: how far activations are apart in the engine (eager, by prefill), the trainer, and it in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rollouts import Rollouts
from variants import ENGINE_ORDER, VARIANTS

from vime_trainer.policy import Policy

__all__ = ["compare_layers"]

_PAIRS = (
    ("default", "engine"),
    (ENGINE_ORDER, "engine"),
    ("engine", "float32"),
    ("default", "float32"),
    (ENGINE_ORDER, "float32"),
)


def compare_layers(model: Path, generated: Path, engine: Path) -> Iterator[dict[str, Any]]:
    """A line for each pair: relative differences of the residual stream and both branches, and of log-probs in nats."""
    found = dict(np.load(engine))
    one = Rollouts.load(generated).first(1)
    one = Rollouts(one.tokens, one.logprobs, found["routes"][None] if "routes" in found else None)
    runs = {
        "engine": found,
        "default": _run(model, one, "bfloat16", "default"),
        ENGINE_ORDER: _run(model, one, "bfloat16", ENGINE_ORDER),
        "float32": _run(model, one, "float32", "default"),
    }
    layers = sum(name.startswith("stream") for name in found)
    for first, second in _PAIRS:
        left, right = runs[first], runs[second]
        yield {
            "of": first,
            "against": second,
            "logprob": float(f"{np.abs(left['logprobs'] - right['logprobs']).mean():.4g}"),
            "norm": _relative(left["norm"], right["norm"]),
            **{
                name: [_relative(left[f"{name}{layer}"], right[f"{name}{layer}"]) for layer in range(layers)]
                for name in ("stream", "attention", "mlp")
            },
        }


def _run(folder: Path, one: Rollouts, dtype: str, variant: str) -> dict[str, np.ndarray]:
    policy = Policy.from_hf(folder, dtype=dtype, replay=one.routes is not None)
    (model,) = policy.chunks
    store: dict[str, np.ndarray] = {}

    def keep(name: str, module: torch.nn.Module) -> None:
        def hook(_: Any, __: Any, out: Any) -> None:
            value = out[0] if isinstance(out, tuple) else out
            store[name] = value.detach().float().reshape(-1, value.shape[-1]).cpu().numpy()

        module.register_forward_hook(hook)

    for number, layer in enumerate(model.decoder.layers):
        keep(f"stream{number}", layer)
        keep(f"attention{number}", layer.self_attention)
        keep(f"mlp{number}", layer.mlp)
    keep("norm", model.decoder.final_layernorm)
    with VARIANTS[variant].use(model), torch.no_grad():
        store["logprobs"] = policy(one.batch(True)).logprobs.float().cpu().numpy()[1:]
    return store


def _relative(one: np.ndarray, other: np.ndarray) -> float:
    # Without the last token: it has no routes.
    return float(f"{np.linalg.norm((one - other)[:-1]) / np.linalg.norm(other[:-1]):.3g}")
