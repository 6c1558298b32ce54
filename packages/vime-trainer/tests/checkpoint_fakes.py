"""Models that are cut over ranks in any way, and ranks that are threads, for tests of checkpoints alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from vime_trainer.checkpoint import Trained

LAYERS, HIDDEN, FFN, VOCAB = 4, 6, 10, 7
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Cut:
    """How a model is spread; `data` stands for data- and context-parallel ranks, which hold the same weights."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    distributed: bool = False

    @property
    def world(self):
        return self.tensor * self.pipeline * self.data

    @property
    def vocab(self):
        """Rows of the embedding, padded as Megatron's must be."""
        return -(-VOCAB // self.tensor) * self.tensor

    def place(self, rank):
        """Tensor, data and pipeline rank."""
        return rank % self.tensor, rank // self.tensor % self.data, rank // (self.tensor * self.data)


def whole_model(seed, dtype=torch.float32):
    """Weights, moments and master weights of a whole model, by kind and name."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (VOCAB, HIDDEN), "head": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.norm": (HIDDEN,),
            f"layers.{layer}.qkv": (3 * HIDDEN, HIDDEN),
            f"layers.{layer}.proj": (HIDDEN, HIDDEN),
            f"layers.{layer}.fc1": (2 * FFN, HIDDEN),
        }
    kinds = {kind: {n: torch.randn(s, generator=generator) for n, s in shapes.items()} for kind in MOMENTS}
    kinds["master"] = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    kinds["weights"] = {name: value.to(dtype) for name, value in kinds["master"].items()}
    return kinds


def local_part(name, value, cut, rank):
    """This rank's part of a whole tensor, None when its stage does not have it."""
    tensor, _, stage = cut.place(rank)
    layer = int(name.split(".")[1]) if name.startswith("layers.") else None
    stages = {"embedding": 0, "head": cut.pipeline - 1, "norm": cut.pipeline - 1}
    if stage != (stages[name] if layer is None else layer * cut.pipeline // LAYERS):
        return None
    kind = name.rpartition(".")[2]
    if kind in ("embedding", "head"):
        value = torch.cat([value, value.new_zeros(cut.vocab - VOCAB, HIDDEN)])
    if kind == "norm":
        return value.clone()
    if kind == "fc1":
        return torch.cat([half.chunk(cut.tensor)[tensor] for half in value.chunk(2)]).clone()
    return value.chunk(cut.tensor, dim=1 if kind == "proj" else 0)[tensor].clone()


class FakePolicy:
    """One rank's parameters."""

    def __init__(self, whole, cut, rank):
        self.cut, self.rank = cut, rank
        parts = {name: local_part(name, value, cut, rank) for name, value in whole["weights"].items()}
        self.params = {name: torch.nn.Parameter(part) for name, part in parts.items() if part is not None}
        self.replica = None

    def sharded_state_dict(self):
        from megatron.core.dist_checkpointing.mapping import ShardedTensor
        from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

        tensor, data, _ = self.cut.place(self.rank)
        entries = {}
        for name, param in self.params.items():
            kind = name.rpartition(".")[2]
            offsets = [] if kind == "norm" else [(1 if kind == "proj" else 0, tensor, self.cut.tensor)]
            replica = self.replica or (0, tensor if kind == "norm" else 0, data)
            flexible = kind in ("embedding", "head")
            entry = ShardedTensor.from_rank_offsets(
                name, param, *offsets, replica_id=replica, allow_shape_mismatch=flexible
            )
            entries[name] = apply_swiglu_sharded_factory(entry, ()) if kind == "fc1" else entry
        return entries


class FakeOptimizer:
    """One rank's moments; those of a distributed optimizer are ranges of all its parameters laid end to end."""

    def __init__(self, policy, whole=None, steps=None):
        self.policy, self.updates, self.skipped = policy, 0, 0
        cut, rank = policy.cut, policy.rank
        names = list(policy.params)
        bf16 = any(param.dtype == torch.bfloat16 for param in policy.params.values())
        spans = {name: None for name in names}
        if cut.distributed:
            spans = _spans(policy.params, cut.data, cut.place(rank)[1])
        self.mains, self.state = {}, {}
        for name, span in spans.items():
            param = policy.params[name]
            piece = slice(None) if span is None else slice(*span)
            main = param if span is None else param.detach().view(-1)[piece]
            if bf16:
                main = torch.nn.Parameter(main.detach().float())
            self.mains[name], self.state[main] = main, {}
            if whole is not None:
                for kind in MOMENTS:
                    part = local_part(name, whole[kind][name], cut, rank)
                    self.state[main][kind] = part if span is None else part.view(-1)[piece].clone()
                self.state[main]["step"] = torch.tensor(float(steps))
                if bf16:
                    part = local_part(name, whole["master"][name], cut, rank)
                    main.data.copy_(part if span is None else part.view(-1)[piece])
        self.spans = spans
        self._inner = SimpleNamespace(
            chained_optimizers=[self._distributed() if cut.distributed else self._plain(bf16)], param_groups=[{}]
        )

    def _plain(self, bf16):
        mains = list(self.mains.values())
        inner = SimpleNamespace(optimizer=SimpleNamespace(state=self.state), get_parameters=lambda: mains)
        if bf16:
            inner.float16_groups = [list(self.policy.params.values())]
            inner.fp32_from_float16_groups = [mains]
        return inner

    def _distributed(self):
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

        inner = object.__new__(DistributedOptimizer)
        params = {name: self.policy.params[name] for name in self.mains}
        inner.model_param_gbuf_map = {param: None for param in params.values()}
        inner.model_param_group_index_map = {param: (0, order) for order, param in enumerate(params.values())}
        ranges = {id(param): Range(*self.spans[name]) for name, param in params.items()}
        inner._get_model_param_range_map = lambda param: {"param": ranges[id(param)]}
        inner.optimizer = SimpleNamespace(
            param_groups=[{"params": list(self.mains.values())}], state=self.state, defaults={}
        )
        return inner


def _spans(params, size, rank):
    total = sum(param.numel() for param in params.values())
    each = -(-total // size)
    low, high, start, spans = rank * each, (rank + 1) * each, 0, {}
    for name, param in params.items():
        first, last = max(low, start), min(high, start + param.numel())
        if first < last:
            spans[name] = (first - start, last - start)
        start += param.numel()
    return spans


def make(whole, cut, rank, steps=5, filled=True):
    """A rank's Trained; zeros without an optimizer state when it is not filled."""
    if not filled:
        whole = {kind: {name: torch.zeros_like(value) for name, value in part.items()} for kind, part in whole.items()}
    policy = FakePolicy(whole, cut, rank)
    return Trained(policy, FakeOptimizer(policy, whole if filled else None, steps))


class Threads:
    """A communicator for ranks that are threads of one process."""

    def __init__(self, size):
        self.size, self._barrier, self._payloads = size, threading.Barrier(size, timeout=60), [b""] * size

    def of(self, rank):
        return SimpleNamespace(rank=rank, size=self.size, gather=lambda payload: self._gather(rank, payload))

    def _gather(self, rank, payload):
        self._payloads[rank] = payload
        self._barrier.wait()
        found = list(self._payloads)
        self._barrier.wait()
        return found


def on_ranks(size, function):
    """Calls function(rank, communicator) on as many threads; results or exceptions by rank."""
    threads = Threads(size)

    def run(rank):
        try:
            return function(rank, threads.of(rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
