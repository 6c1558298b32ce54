"""What route capture costs the host of an engine at every step, without a model: vLLM's scheduler, its messages, its front end.

    python benchmarks/bench_capture_host.py [--layers 48 --experts 128 --top-k 8 --requests 256 --prompt 128 --tokens 512 --waves 1]

With `--waves 1` all requests come at once and have equally many tokens. With more, answers have half to one and a half times as
many tokens and the next request comes when one ends, so that most steps have a prompt too; all steps then count as decoding.

Milliseconds of CPU a step of decoding (one token for each request; the traces made at the end are in it) and a prompt, medians over
rounds in alternating order: off and on as vime-rollout does it, and as vLLM does it. "core" is scheduler and packing, "front end"
unpacking and what becomes of it: on a GPU's host two processes, and a step takes at least as long as the slower of them. What it
costs to copy routes from the GPU is not in it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from answers import add_waves, lengths, longest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))
import models
import schedulers

BLOCK = 16


class Pipe:
    """The socket between vLLM's processes, with both ends here."""

    def __init__(self, folder: Path):
        import zmq
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        context = zmq.Context.instance()
        self.near, self.far = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket in (self.near, self.far):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self.near.bind(f"ipc://{folder}/socket")
        self.far.connect(f"ipc://{folder}/socket")

    def send(self, outputs) -> None:
        self.near.send_multipart(self.encoder.encode_into(outputs, bytearray()), copy=False)

    def receive(self):
        return self.decoder.decode(self.far.recv_multipart(copy=False))


def run(kind, folder: Path, pipe: Pipe, options, capture: bool, joined: bool) -> dict[str, float]:
    """All requests from their first to their last step; milliseconds a step of decoding, or a prompt."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.outputs import LogprobsLists

    from vime_proto.version import policy_version
    from vime_r3 import capture as r3
    from vime_rollout.engine.backend import _packing
    from vime_rollout.engine.backend._collect import SinkCollector

    answers = lengths(options)
    length = options.prompt + max(answers)
    blocks = options.requests * (length // BLOCK + 2)
    sizes = {"block_size": BLOCK, "max_seqs": options.requests, "budget": 8192, "length": length}
    one = schedulers.make(kind, folder, blocks, capture=capture, **sizes)
    front = OutputProcessor(None, log_stats=False)
    if joined:
        _packing.take_apart(front)
    rng = np.random.default_rng(0)
    row = np.stack([rng.permutation(options.experts)[: options.top_k] for _ in range(options.layers)])
    routes = np.broadcast_to(row, (8192, *row.shape)).astype(np.int32)
    version, done = policy_version("run", 0, 1), []

    def sink(tokens: int, output) -> None:
        if output.finish is not None:
            done.append(output.finish)
            if capture:
                r3.from_vllm(
                    output.routes, moe_layer_ids=range(options.layers), experts=options.experts, top_k=options.top_k,
                    version=version, prompt_tokens=options.prompt, generated_tokens=tokens,
                )  # fmt: skip

    def add(number: int) -> None:
        tokens = answers[number]
        params = SamplingParams(
            max_tokens=tokens, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        name, prompt = f"{number:032x}-{number:08x}", rng.integers(3, 60, options.prompt).tolist()
        one.add_request(schedulers.request(name, prompt, params, BLOCK))
        asked = EngineCoreRequest(name, prompt, None, params, None, 0.0, None, None, None, external_req_id=name)
        front.add_request(asked, None, None, 0, SinkCollector(name, functools.partial(sink, tokens)))

    def logprobs(n: int) -> LogprobsLists:
        return LogprobsLists(np.ones((n, 1), np.int32), np.full((n, 1), -1.0, np.float32), np.ones(n, np.int32), None)

    spent = {(part, name): 0.0 for part in ("decoding", "prompts") for name in ("core", "front end")}
    added = 0
    while len(done) < len(answers):
        while added < min(len(answers), len(done) + options.requests):
            add(added)
            added += 1
        at = time.process_time()
        scheduled = one.schedule()
        seconds = time.process_time() - at
        counts = scheduled.num_scheduled_tokens
        steady = scheduled.total_num_scheduled_tokens == len(counts) == options.requests
        part = "decoding" if steady or options.waves > 1 else "prompts"
        spent[part, "core"] += seconds
        answer = schedulers.work(one, scheduled, (lambda n: routes[:n]) if capture else None, logprobs, BLOCK)
        at = time.process_time()
        for outputs in one.update_from_output(scheduled, answer).values():
            pipe.send(outputs)
            sent = time.process_time()
            spent[part, "core"] += sent - at
            received = pipe.receive()
            for start in range(0, len(received.outputs), 128):
                front.process_outputs(received.outputs[start : start + 128], received.timestamp, None)
            at = time.process_time()
            spent[part, "front end"] += at - sent
        spent[part, "core"] += time.process_time() - at
    per = {"decoding": sum(answers) / options.requests, "prompts": len(answers)}
    return {" ".join(key): 1e3 * seconds / per[key[0]] for key, seconds in spent.items() if seconds}


def main() -> None:
    """Runs all three, several times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    add_waves(parser)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    import vllm
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from vime_rollout.engine.backend import _scheduler

    kinds = {
        "off": (_scheduler.JoinedAsyncScheduler, False, True),
        "on": (_scheduler.JoinedAsyncScheduler, True, True),
        "off, vLLM's": (AsyncScheduler, False, False),
        "on, vLLM's": (AsyncScheduler, True, False),
    }
    cfg = models.config(moe=True, layers=options.layers) | {
        "num_experts": options.experts, "num_experts_per_tok": options.top_k, "mlp_only_layers": [],
        "max_position_embeddings": options.prompt + longest(options),
    }  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        models.save(Path(folder), cfg, {})
        pipe = Pipe(Path(folder))
        for number in range(options.rounds):
            for name in list(kinds)[:: -1 if number % 2 else 1]:
                kind, capture, joined = kinds[name]
                # As vLLM does in its processes: what was imported is not searched for garbage again and again.
                gc.collect()
                gc.freeze()
                found[name].append(run(kind, Path(folder), pipe, options, capture, joined))
    print(
        f"vLLM {vllm.__version__}, {platform.machine()}; {options.requests} places, {options.waves} waves, "
        f"{options.layers} x {options.top_k} ids a token, {options.prompt} + {options.tokens} tokens, {options.rounds} rounds; "
        "ms of CPU, medians (spreads)"
    )
    for name, rounds in found.items():
        line = []
        for key in rounds[0]:
            values = [one[key] for one in rounds]
            line.append(f"{key} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        print(f"{name:11} {', '.join(line)}")


if __name__ == "__main__":
    main()
