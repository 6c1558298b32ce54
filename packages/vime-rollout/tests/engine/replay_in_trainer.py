"""Run by the trainer's interpreter: does what it is asked, and answers each request with what went wrong, or null.

A request is a line of standard input, a JSON list:

    ["logprobs", ARGUMENT, ...]                               the command `vime-trainer logprobs`
    ["replay", MODEL_FOLDER, ENGINE.npz, RESULT.npz, DTYPE]   replays an engine's routes and writes what came of it

ENGINE.npz: lengths [samples], tokens [T], routes [T, layers, top_k] (rows of last tokens are not used), layer_ids [layers].
RESULT.npz: replayed and alone, float32 [T] log-probs; chosen, bool [layers, T, experts], the experts that really ran under
replay; flips, int64 [layers], rows where the trainer alone would have chosen other experts; gates, float32
[layers, experts, hidden], gradients of the replayed log-probs' sum.
"""

import dataclasses
import json
import os
import sys
import traceback

import numpy as np
import torch

from vime_trainer.commands import logprobs
from vime_trainer.packed import ReplayRows, pack
from vime_trainer.policy import Policy


def replay(folder: str, source: str, target: str, dtype: str) -> None:
    """See the module."""
    given = np.load(source)
    lengths = given["lengths"].tolist()
    policy = Policy.from_hf(folder, dtype=dtype, replay=True)
    batch = pack(torch.from_numpy(given["tokens"]).split(lengths))
    valid = np.ones(batch.total, bool)
    valid[np.cumsum(lengths) - 1] = False
    layers = tuple(given["layer_ids"].tolist())
    routes = ReplayRows(given["routes"], valid, layers, measure=True)
    with torch.no_grad():
        alone = policy(batch).logprobs
    chosen = {}
    routers = policy.router_modules()
    for layer, router in routers.items():
        router.register_forward_hook(lambda _m, _i, out, layer=layer: chosen.update({layer: out[1].numpy()}))
    out = policy(dataclasses.replace(batch, routes=routes))
    out.logprobs.sum().backward()
    np.savez(
        target,
        replayed=out.logprobs.detach().numpy(),
        alone=alone.numpy(),
        chosen=np.stack([chosen[layer] for layer in layers]),
        flips=out.usage.flips.numpy(),
        gates=np.stack([routers[layer].weight.grad.float().numpy() for layer in layers]),
    )


def main() -> None:
    """Works until its input ends."""
    # Only answers go to standard output, whatever else is printed.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        kind, *words = json.loads(line)
        fault = None
        try:
            if kind == "replay":
                replay(*words)
            else:
                logprobs.main(words, "vime-trainer logprobs")
        except (Exception, SystemExit):
            fault = traceback.format_exc()
        print(json.dumps(fault), file=answers, flush=True)


if __name__ == "__main__":
    main()
