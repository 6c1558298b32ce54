"""Where a step's time goes besides the model's passes: 256 short rollouts, decoded, planned and laid out, with routes.

    python benchmarks/bench_rl_step.py

The model is a stand-in that costs nothing, so what is timed is the trainer's own work on a batch.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import numpy as np
import torch

from vime_proto.sample.v1 import sample_pb2
from vime_proto.tensor import to_tensor
from vime_proto.version import policy_version
from vime_r3.megatron import Usage
from vime_r3.trace import encode
from vime_trainer.batch import BatchIndex, index_group, read_columns
from vime_trainer.packed import TokenOutputs
from vime_trainer.rl import RlSettings
from vime_trainer.rl._train import BatchTrainer

GROUPS, SIZE, PROMPT, ANSWER = 32, 8, 8, 4
LAYERS, EXPERTS, TOP_K = (0, 1), 8, 2


class NoModel:
    """Log-probs from a single parameter: forward and backward cost next to nothing."""

    vocab_size = 32
    moe_layers = routed_layers = None
    cost = critic = None

    def __init__(self):
        self.weight = torch.zeros(1, requires_grad=True)

    def routed_tokens(self, micro_batches):
        return [np.arange(sum(lengths)) for lengths in micro_batches]

    def run(self, batches, wanted, loss=None):
        outputs = [self._outputs(batch) for batch in batches]
        if loss is not None:
            for i, one in enumerate(outputs):
                loss(i, one).backward()
        return outputs

    def _outputs(self, batch):
        none = torch.zeros(batch.total, dtype=torch.int64)
        flips = torch.zeros(len(LAYERS), dtype=torch.int64)
        usage = Usage(LAYERS, batch.total, flips, none > 0, replayed=none + len(LAYERS))
        return TokenOutputs(self.weight.expand(batch.total) - 1.0, torch.ones(batch.total), usage)

    def zero_grad(self):
        self.weight.grad = None

    def step(self):
        class Done:
            applied, learning_rate, grad_norm, clipped = True, 0.0, 0.0, False

        return Done


def make_group(g: int, random: np.random.Generator) -> sample_pb2.Group:
    group = sample_pb2.Group(group_id=f"g{g}", prompt=sample_pb2.Prompt(prompt_id=f"g{g}", text="x"))
    version = policy_version("run", 0, 0)
    for i in range(SIZE):
        rollout = group.rollouts.add(
            rollout_id=f"{g}.{i}", attempt=1, status=sample_pb2.ROLLOUT_STATUS_COMPLETED, reward=float(i % 2)
        )
        sample = rollout.samples.add(sample_id=f"{g}.{i}.0")
        ids = random.integers(0, 32, PROMPT).astype(np.int32)
        sample.segments.add(role=sample_pb2.SEGMENT_ROLE_PROMPT, token_ids=to_tensor(ids))
        answer = sample.segments.add(role=sample_pb2.SEGMENT_ROLE_MODEL, trainable_all=True)
        answer.token_ids.CopyFrom(to_tensor(random.integers(0, 32, ANSWER).astype(np.int32)))
        answer.generation.logprobs.CopyFrom(to_tensor(np.full(ANSWER, -1.0, np.float32)))
        answer.generation.logprob_mode = sample_pb2.LOGPROB_MODE_PROCESSED
        answer.generation.version.CopyFrom(version)
        answer.generation.sampling.temperature = 1.0
        answer.generation.sampling.max_new_tokens = ANSWER
        rows = PROMPT + ANSWER - 1
        ids = np.argsort(random.random((rows, len(LAYERS), EXPERTS)))[..., :TOP_K]
        sample.routing.CopyFrom(encode(ids, layer_ids=LAYERS, experts=EXPERTS, version=version))
    return group


def main() -> None:
    random = np.random.default_rng(0)
    groups = [make_group(g, random) for g in range(GROUPS)]
    indices = [index_group(group) for group in groups]
    samples = [s.SerializeToString() for g in groups for r in g.rollouts for s in r.samples]
    settings = RlSettings(
        model="m", output="o", buffer="h:1", router="h:2", r3="replay", batch={"groups": GROUPS, "group_size": SIZE}
    )
    trainer = BatchTrainer(NoModel(), settings)
    best: dict[str, float] = {}
    for _ in range(10):
        marks = [("", time.perf_counter())]
        index = BatchIndex.from_groups(indices)
        marks.append(("index", time.perf_counter()))
        parsed = {one.sample_id: one for one in map(sample_pb2.Sample.FromString, samples)}
        marks.append(("parse", time.perf_counter()))
        columns = read_columns(index, parsed, 32)
        marks.append(("columns", time.perf_counter()))
        trainer.train(index, columns, SIZE)
        marks.append(("routes, layout, loss", time.perf_counter()))
        for (_, before), (name, after) in zip(marks[:-1], marks[1:], strict=True):
            best[name] = min(best.get(name, 9.0), after - before)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {Path(__file__).name}, best of 10")
    for name, seconds in best.items():
        print(f"{name:24} {seconds * 1e3:8.2f} ms")
    print(f"{'total':24} {sum(best.values()) * 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
