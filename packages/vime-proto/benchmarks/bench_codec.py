"""Encoding and decoding of a long sample, against a copy of the same bytes.

One sample of 8,192 tokens: ids, log-probs, mask, and the routes of a 48-layer top-8 mixture of experts as one raw chunk. Each
figure is the median over rounds that take every case in turn, so that a busy machine hits all of them alike.

    python benchmarks/bench_codec.py [--rounds 50] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vime_proto import sample_views
from vime_proto.checksum import checksum
from vime_proto.common.v1 import common_pb2
from vime_proto.fakes import build
from vime_proto.routing.v1 import routing_pb2
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_numpy, to_tensor
from vime_proto.validate import validate_sample
from vime_proto.version import policy_version

TOKENS, PROMPT, LAYERS, TOP_K, EXPERTS, VOCAB = 8192, 1024, 48, 8, 128, 151_936
VERSION = policy_version("bench", 0, 0)


def arrays() -> dict[str, np.ndarray]:
    """The sample's numbers."""
    rng = np.random.default_rng(0)
    new = TOKENS - PROMPT
    return {
        "prompt": rng.integers(0, VOCAB, PROMPT, dtype=np.int32),
        "tokens": rng.integers(0, VOCAB, new, dtype=np.int32),
        "logprobs": -rng.exponential(1.0, new).astype(np.float32),
        "mask": rng.random(new) < 0.9,
        "routes": rng.integers(0, EXPERTS, (TOKENS - 1, LAYERS, TOP_K), dtype=np.uint8),
    }


def encode(given: dict[str, np.ndarray], with_trace: bool) -> bytes:
    """Arrays to bytes on the wire."""
    generation = pb.Generation(
        logprobs=to_tensor(given["logprobs"]),
        logprob_mode=pb.LOGPROB_MODE_PROCESSED,
        version=VERSION,
        sampling=build.sampling(max_new_tokens=TOKENS),
    )
    sample = pb.Sample(sample_id="bench")
    sample.segments.add(role=pb.SEGMENT_ROLE_PROMPT, token_ids=to_tensor(given["prompt"]))
    sample.segments.add(
        role=pb.SEGMENT_ROLE_MODEL,
        token_ids=to_tensor(given["tokens"]),
        trainable_mask=to_tensor(given["mask"]),
        generation=generation,
    )
    if with_trace:
        _attach(sample.routing, given["routes"])
    return sample.SerializeToString()


def _attach(trace: routing_pb2.RoutingTrace, routes: np.ndarray) -> None:
    """The routes as one raw chunk with its checksum."""
    rows, layers, top_k = routes.shape
    trace.inline = routes.tobytes()
    header = trace.header
    header.experts, header.top_k, header.rows, header.payload_length = EXPERTS, top_k, rows, routes.nbytes
    header.dtype = common_pb2.DTYPE_UINT8
    header.layer_ids.extend(range(layers))
    header.spans.add(rows=common_pb2.IndexRange(start=0, stop=rows), version=VERSION)
    header.chunks.add(
        rows=common_pb2.IndexRange(start=0, stop=rows),
        layers=common_pb2.IndexRange(start=0, stop=layers),
        stored=common_pb2.ByteRange(offset=0, length=routes.nbytes),
        raw_length=routes.nbytes,
        checksum=checksum(routes.data),
        compression=routing_pb2.COMPRESSION_NONE,
    )


def decode(data: bytes) -> list[np.ndarray]:
    """Bytes on the wire to arrays."""
    sample = pb.Sample.FromString(data)
    found = [sample_views.token_ids(sample), sample_views.trainable_mask(sample)]
    found.append(to_numpy(sample.segments[1].generation.logprobs))
    if sample.HasField("routing"):
        header = sample.routing.header
        routes = np.frombuffer(sample.routing.inline, np.uint8)
        found.append(routes.reshape(header.rows, len(header.layer_ids), header.top_k))
    return found


def medians(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each case; the cases take turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            began = time.perf_counter()
            case()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[len(values) // 5 :]) for name, values in times.items()}


def measure(rounds: int) -> list[dict[str, float | str]]:
    """One row per size of sample."""
    given, rows = arrays(), []
    for label, with_trace in (("tokens, log-probs, mask", False), ("the same with a 48-layer top-8 trace", True)):
        data = encode(given, with_trace)
        sample = pb.Sample.FromString(data)
        back = decode(data)
        np.testing.assert_array_equal(back[0], np.concatenate([given["prompt"], given["tokens"]]))
        np.testing.assert_array_equal(back[2], given["logprobs"])
        if with_trace:
            np.testing.assert_array_equal(back[3], given["routes"])
        cases = {
            "copy": lambda data=data: bytearray(data),
            "encode": lambda with_trace=with_trace: encode(given, with_trace),
            "decode": lambda data=data: decode(data),
            "validate": lambda sample=sample: validate_sample(sample, vocab_size=VOCAB),
        }
        found = medians(cases, rounds)
        rows.append(
            {
                "sample": label,
                "bytes": len(data),
                **found,
                **{f"{n}/copy": found[n] / found["copy"] for n in ("encode", "decode")},
            }
        )
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    rows = measure(arguments.rounds)
    machine = f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    for row in rows:
        times = ", ".join(f"{name} {row[name] * 1e6:,.0f} us" for name in ("copy", "encode", "decode", "validate"))
        ratios = f"encode {row['encode/copy']:.1f}x, decode {row['decode/copy']:.1f}x a copy"
        print(f"{row['sample']} ({row['bytes']:,} bytes): {times}; {ratios}")
    print(f"median of {arguments.rounds} rounds on {machine}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "rounds": arguments.rounds, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
