"""What every layout of ranks must compute alike: tiny models, batches that are awkward to cut, two optimizer steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vime_trainer.megatron import Parallel, ParallelConfig
from vime_trainer.optim import Optimizer, OptimizerSettings
from vime_trainer.packed import PackedBatch, RecordRows, ReplayRows, TokenOutputs, pack
from vime_trainer.policy import Policy
from vime_trainer.value import ValueModel, ValueOutputs

VOCAB, LAYERS, EXPERTS, TOP_K = 61, 4, 4, 2
MOE_LAYERS = {"moe": (0, 2, 3), "glm": (1, 2, 3)}

MICRO_BATCHES = ([7, 2, 11], [5, 13], [1, 3, 2, 9], [4])
"""Lengths of the sequences. No total is a multiple of 4; one sequence has a single token, one batch a single sequence."""

ONLY_TWO_TOKENS = ([2], [2], [2], [2])


@dataclass(frozen=True)
class Case:
    """One layout of ranks and what to try in it.

    Attributes:
        name: of the case.
        model: "dense", "tied", "odd" (tied, a layer more), "moe" or "glm" (GLM-4.5).
        sizes: of ParallelConfig.
        variant: "plain", "routed" (replays routes), "recorded" (replays its own first choice in all that follows), "masked"
            (the odd micro-batches have no trainable token), "short" (two tokens a micro-batch), "three" (one micro-batch
            less), "poison" (the gradient of one micro-batch is NaN).
        policy: arguments of Policy.from_hf.
        optimizer: settings that differ.
        critic: a ValueModel instead of a Policy; its values stand for log-probs.
    """

    name: str
    model: str
    sizes: dict[str, int] = field(default_factory=dict)
    variant: str = "plain"
    policy: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    critic: bool = False

    def to_json(self) -> dict[str, Any]:
        """For the command line of a rank."""
        return dict(vars(self))


def make_models(root: Path) -> None:
    """Folders of the models, with norm weights that are not 1."""
    common = {
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }
    moe = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [layer for layer in range(LAYERS) if layer not in MOE_LAYERS["moe"]],
        "decoder_sparse_step": 1,
    }
    glm = {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
    }
    kinds = {
        "dense": {"model_type": "qwen3", "tie_word_embeddings": False},
        "tied": {"model_type": "qwen3", "tie_word_embeddings": True},
        "odd": {"model_type": "qwen3", "tie_word_embeddings": True, "num_hidden_layers": LAYERS + 1},
        "moe": {"model_type": "qwen3_moe", "tie_word_embeddings": False, **moe},
        "glm": {"model_type": "glm4_moe", "tie_word_embeddings": False, **glm},
    }
    for name, values in kinds.items():
        folder = root / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(common | values))
        policy = Policy.from_config(folder, seed=5)
        torch.manual_seed(6)
        with torch.no_grad():
            for param in policy.weights().values():
                if param.dim() == 1:
                    param.add_(0.2 * torch.randn(param.shape).to(param))
        policy.save_hf(folder, side_files=folder)


def micro_batches(variant: str, model: str = "moe") -> list[tuple[PackedBatch, torch.Tensor, torch.Tensor]]:
    """Batches, the tokens that need the head (bool [T]) and their weights in the loss (float32 [T])."""
    generator = torch.Generator().manual_seed(7)
    found = []
    cuts = ONLY_TWO_TOKENS if variant == "short" else MICRO_BATCHES
    for number, lengths in enumerate(cuts[:3] if variant == "three" else cuts):
        rows = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]
        heat = (0.6 + torch.rand(len(rows), generator=generator)).tolist()
        batch = pack(rows, heat)
        mask = torch.rand(batch.total, generator=generator) < 0.8
        if variant == "short":
            mask[:] = True
        if variant == "masked" and number % 2:
            mask[:] = False
        weights = torch.randn(batch.total, generator=generator) * mask / 20.0
        if variant == "poison" and number == 1:
            weights[:] = torch.nan
        if variant == "routed":
            batch = with_routes(batch, number, MOE_LAYERS[model])
        found.append((batch, mask, weights))
    return found


def with_routes(batch: PackedBatch, seed: int, layers: tuple[int, ...]) -> PackedBatch:
    """Routes that the model would not have chosen; last tokens of sequences have none, and some others neither."""
    generator = np.random.default_rng(seed)
    ids = np.stack([[generator.permutation(EXPERTS)[:TOP_K] for _ in layers] for _ in range(batch.total)]).astype(
        np.uint8
    )
    valid = np.ones(batch.total, dtype=bool)
    valid[batch.cu_seqlens[1:].numpy() - 1] = False
    valid[2::7] = False
    exact = np.arange(batch.total) % 3 > 0
    return replace(batch, routes=ReplayRows(ids, valid, layers, measure=True, exact=exact))


def as_fetched(policy: Policy, batches: list[PackedBatch]) -> list[PackedBatch]:
    """The batches with only those routes that this rank asks for: rows of the tokens that it routes, in its layers."""
    found = []
    layers = [layer for layer in policy.layers if layer in policy.arch.moe_layers]
    for batch, places in zip(batches, policy.routed_tokens([batch.lengths for batch in batches]), strict=True):
        routes = batch.routes
        fetched = np.isin(np.arange(batch.total), places)
        columns = [routes.layer_ids.index(layer) for layer in layers]
        ids = np.where(fetched[:, None, None], routes.ids[:, columns], np.uint8(0))
        mine = replace(routes, ids=ids, valid=routes.valid & fetched, layer_ids=tuple(layers), fetched=fetched)
        found.append(replace(batch, routes=mine))
    return found


def make_model(case: Case, root: Path) -> Policy | ValueModel:
    """The model of a case, with the head that it asks for."""
    parallel = ParallelConfig(**case.sizes)
    if case.critic:
        return ValueModel.from_hf(root / case.model, parallel=parallel, head_std=0.3, seed=8, **case.policy)
    replay = case.variant in ("routed", "recorded")
    return Policy.from_hf(root / case.model, replay=replay, parallel=parallel, **case.policy)


def as_tokens(outputs: TokenOutputs | ValueOutputs) -> TokenOutputs:
    """Values in the place of log-probs."""
    if isinstance(outputs, TokenOutputs):
        return outputs
    return TokenOutputs(outputs.values, torch.zeros_like(outputs.values))


def run(case: Case, root: Path) -> dict[str, torch.Tensor]:
    """Everything that must not depend on the layout, as far as this rank has it.

    Returns:
        "logprobs.N", "entropy.N" of micro-batch N before the first step and "flipped.N", "flips.N", "replayed.N" (and
        "inexact.N" of given routes) where routes were replayed, on ranks of the last stage; "loss", "norm" and "applied"
        of each step; the Hugging Face tensors after the steps as "hf.NAME" on rank 0.
    """
    policy = make_model(case, root)
    here = policy.parallel
    settings = {"learning_rate": 1e-2, "epsilon": 1e-3, "clip_grad_norm": 0.5, "weight_decay": 0.1}
    optimizer = Optimizer(policy, OptimizerSettings(**(settings | case.optimizer)))
    work = micro_batches(case.variant, case.model)
    mine = list(range(len(work)))[here.data_rank :: here.data_size]
    batches, masks = [work[n][0] for n in mine], [work[n][1] for n in mine]
    if case.variant == "routed":
        batches = as_fetched(policy, batches)
    if case.variant == "recorded":
        policy.run([replace(batch, routes=RecordRows()) for batch in batches], masks)
        kept = [replace(routes, measure=True) for routes in policy.recorded]
        batches = [replace(batch, routes=routes) for batch, routes in zip(batches, kept, strict=True)]
    found: dict[str, torch.Tensor] = {}
    for number, out in zip(mine, map(as_tokens, policy.run(batches, masks)), strict=False):
        found[f"logprobs.{number}"], found[f"entropy.{number}"] = out.logprobs, out.entropy
        if out.usage is not None:
            found[f"flips.{number}"], found[f"flipped.{number}"] = out.usage.flips, out.usage.flipped.long()
            found[f"replayed.{number}"] = out.usage.replayed
            if case.variant == "routed":
                found[f"inexact.{number}"] = out.usage.inexact.long()
    losses, norms, applied = [], [], []
    for _ in range(2):
        optimizer.zero_grad()
        total = 0.0

        def loss(index, outputs):
            nonlocal total
            outputs = as_tokens(outputs)
            weights = work[mine[index]][2].to(outputs.logprobs.device)
            value = -(outputs.logprobs * weights).sum() - 0.003 * outputs.entropy.sum()
            total += float(value.detach())
            return value

        policy.run(batches, masks, loss)
        result = optimizer.step()
        losses.append(float(here.sum_data(np.array([total]))[0]))
        norms.append(result.grad_norm)
        applied.append(float(result.applied))
    if here.is_last_stage:
        found["loss"] = torch.tensor(losses)
    found["norm"], found["applied"] = torch.tensor(norms), torch.tensor(applied)
    for name, tensor in policy.hf_tensors():
        found[f"hf.{name}"] = tensor.clone()
    return {name: value.cpu() for name, value in found.items()}


def refusals(root: Path) -> list[str]:
    """What two ranks should have refused, and did not, or said otherwise."""
    wrong = []

    def check(message: str, act: Callable[[], object]) -> None:
        try:
            act()
        except ValueError as error:
            if message not in str(error):
                wrong.append(f"{message!r} was {error}")
        else:
            wrong.append(f"{message!r} was not raised")

    def load(model: str, **sizes: int) -> Policy:
        return Policy.from_hf(root / model, parallel=ParallelConfig(**sizes))

    check("parallel.sequence: Megatron's MoE layers need it", lambda: load("moe", tensor=2, sequence=False))
    check("parallel.expert: 2, but the model has no experts", lambda: load("dense", expert=2))
    check("parallel.virtual: 2 stages of 4 model chunks are too many", lambda: load("dense", pipeline=2, virtual=4))
    batch = pack([[1, 2, 3]])
    check("forward: needs a model without pipeline stages", lambda: load("dense", pipeline=2).forward(batch))
    policy = load("moe", expert=2)
    batches = [batch] * (1 + policy.parallel.rank)
    check("batches: ranks were given different numbers", lambda: policy.run(batches, [None] * len(batches)))
    return wrong


def exchange(here: Parallel) -> list[str]:
    """Which of a rank's exchanges went wrong in the present layout."""
    wrong = []

    def check(name: str, right: bool) -> None:
        if not right:
            wrong.append(name)

    last = here.world - 1
    payload = bytes(range(256)) * 5
    check("broadcast", here.broadcast(payload if here.rank == last else None, source=last) == payload)
    check("empty broadcast", here.broadcast(b"" if here.is_leader else None) == b"")
    own = f"replica {here.data_rank}".encode()
    check("from_last_stage", here.from_last_stage(own if here.is_last_stage else None) == own)
    check("empty from_last_stage", here.from_last_stage(b"" if here.is_last_stage else None) == b"")
    ranks = np.arange(here.data_size)
    total = here.sum_data(np.array([[here.data_rank + 0.5, 1.0]]))
    check("sum_data", bool((total == [[float((ranks + 0.5).sum()), here.data_size]]).all()))
    parts = here.gather_data(np.full(2 * here.data_rank, here.data_rank, dtype=np.int16))
    check("gather_data", [part.tolist() for part in parts] == [[rank] * 2 * rank for rank in ranks])
    check("gather_data dtype", all(part.dtype == np.int16 for part in parts))
    check("gather", [part.tolist() for part in here.gather(np.array([here.rank]))] == [[r] for r in range(here.world)])
    try:
        here.gather(np.array([1]), f"rank {here.rank}")
        check("gather of different things", False)
    except RuntimeError as error:
        check("gather of different things", "not in step" in str(error))
    here.barrier()
    return wrong
