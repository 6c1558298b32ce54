"""A backend over the toy model of vime_proto's fake engine, in torch: what it trains, the fake engines really serve."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from vime_proto.fakes import toy_weights
from vime_trainer.checkpoint import RunState
from vime_trainer.checkpoint._folders import STATE, path_of, prune
from vime_trainer.files import new_directory
from vime_trainer.packed import PackedBatch, TokenOutputs

VOCAB = 32
EXPERT_LAYERS, EXPERTS, TOP_K = (0, 1), 4, 2


@dataclasses.dataclass(frozen=True)
class Outcome:
    applied: bool
    learning_rate: float
    grad_norm: float
    clipped: bool = False


def run_passes(forward, batches, wanted, loss=None) -> list:
    """`Backend.run` over a differentiable forward pass of one micro-batch."""
    outputs = []
    for i, (batch, mask) in enumerate(zip(batches, wanted, strict=True)):
        with torch.set_grad_enabled(loss is not None):
            found = forward(batch, mask)
            if loss is not None:
                loss(i, found).backward()
        tensors = {name: value for name, value in vars(found).items() if isinstance(value, torch.Tensor)}
        outputs.append(dataclasses.replace(found, **{name: value.detach() for name, value in tensors.items()}))
    return outputs


class ToyBackend:
    """Trains the toy model with Adam, and remembers which prompts each optimizer step saw."""

    vocab_size = VOCAB
    routed_layers = None
    cost = critic = None

    def __init__(self, settings=None, learning_rate: float = 0.02):
        self.weights = {
            name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, (array, _) in toy_weights(0).items()
        }
        self.reference = {name: value.detach().clone() for name, value in self.weights.items()}
        self.optimizer = torch.optim.Adam(self.weights.values(), lr=learning_rate)
        self.learning_rate = learning_rate
        self.trained: list[list[tuple[int, ...]]] = []
        self.seen: set[tuple[int, ...]] = set()
        self.poison = False

    def _outputs(self, weights, batch: PackedBatch, wanted: torch.Tensor) -> TokenOutputs:
        embedding = weights["model.embed_tokens.weight"]
        last = embedding[batch.tokens]
        before = torch.cat([torch.zeros_like(last[:1]), last[:-1]])
        before = torch.where((batch.positions == 0)[:, None], torch.zeros_like(before), before)
        hidden = torch.tanh(last + 0.5 * before) * weights["model.norm.weight"]
        logits = hidden @ weights["lm_head.weight"].T
        logits = torch.cat([logits[:1], logits[:-1]]) / batch.temperature[:, None]
        logp = logits.log_softmax(-1)
        chosen = logp.gather(1, batch.tokens[:, None]).squeeze(1)
        entropy = -(logp.exp() * logp).sum(-1)
        off = (batch.positions == 0) | ~wanted
        return TokenOutputs(chosen.masked_fill(off, 0.0), entropy.masked_fill(off, 0.0))

    def run(self, batches, wanted, loss=None) -> list[TokenOutputs]:
        if loss is not None:
            for batch in batches:
                bounds = batch.cu_seqlens.tolist()
                for low, high in zip(bounds[:-1], bounds[1:], strict=True):
                    self.seen.add(tuple(batch.tokens[low : min(low + 3, high)].tolist()))
        return run_passes(lambda batch, mask: self._outputs(self.weights, batch, mask), batches, wanted, loss)

    def run_reference(self, batches, wanted) -> list[TokenOutputs]:
        return run_passes(lambda batch, mask: self._outputs(self.reference, batch, mask), batches, wanted)

    def refresh_reference(self, folder: Path) -> None:
        self.export(folder)
        self.load_reference(folder)

    def load_reference(self, folder: Path) -> None:
        self.reference = load_file(folder / "model.safetensors")

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.seen = set()

    def step(self) -> Outcome:
        grads = [p.grad for p in self.weights.values() if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in grads]).norm())
        if self.poison or not np.isfinite(norm):
            self.poison = False
            return Outcome(False, self.learning_rate, float("nan"))
        self.optimizer.step()
        self.trained.append(sorted(self.seen))
        return Outcome(True, self.learning_rate, norm)

    def hf_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return iter([(name, value.detach()) for name, value in self.weights.items()])

    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.detach().clone() for name, value in self.weights.items()}, folder / "model.safetensors")

    def save(self, root: Path, state: RunState, keep: int) -> Future[Path]:
        path = path_of(root, state.step)
        moments = {
            f"{name}/{key}": torch.as_tensor(value)
            for name, weight in self.weights.items()
            for key, value in self.optimizer.state.get(weight, {}).items()
        }
        tensors = {**{name: value.detach() for name, value in self.weights.items()}, **moments}
        with new_directory(path) as made:
            save_file({name: value.clone().contiguous() for name, value in tensors.items()}, made / "all.safetensors")
            content = {"state": dataclasses.asdict(state), "trained": self.trained}
            (made / STATE).write_text(json.dumps(content))
        prune(root, keep)
        done = Future()
        done.set_result(path)
        return done

    def restore(self, path: Path) -> RunState:
        content, tensors = json.loads((path / STATE).read_text()), load_file(path / "all.safetensors")
        for name, weight in self.weights.items():
            weight.data.copy_(tensors[name])
            found = {k.rpartition("/")[2]: v for k, v in tensors.items() if k.rpartition("/")[0] == name}
            if found:
                self.optimizer.state[weight] = found
        self.trained = [[tuple(code) for code in step] for step in content["trained"]]
        return RunState(**content["state"])
