"""Ranks fetch their share of the routes from a real buffer, and not a byte of another's.

The buffer is another program: VIME_PYTHON_BUFFER names an interpreter that has vime-buffer.
"""

import os
import subprocess
import time

import numpy as np
import pytest

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.buffer.v1 import buffer_pb2_grpc
from vime_proto.channel import open_sync_channel
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.fakes import build
from vime_proto.sample.v1 import sample_pb2 as sample
from vime_proto.version import policy_version
from vime_r3.layout import pack, take
from vime_r3.shards import join_layers, layer_ranges, payload_bytes, row_ranges
from vime_r3.trace import decode, encode

BUFFER = os.environ.get("VIME_PYTHON_BUFFER")
pytestmark = pytest.mark.skipif(not BUFFER, reason="VIME_PYTHON_BUFFER names no interpreter with vime-buffer")

RUN, V0 = "budget", policy_version("budget", 0, 0)
LAYERS = (1, 2, 3, 4, 5, 6)
STAGES = ((1, 2, 5), (3, 4, 6))
LENGTHS = (90, 41, 64, 7)


@pytest.fixture
def buffer(tmp_path):
    address = tmp_path / "address"
    command = [BUFFER, "-m", "vime_buffer", "serve", "--database", tmp_path / "buffer.db", "--address-file", address]
    process = subprocess.Popen([*map(str, command), "--exit-with-parent"], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not address.exists():
            assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
            time.sleep(0.05)
        with open_sync_channel(address.read_text()) as channel:
            yield buffer_pb2_grpc.BufferServiceStub(channel)
    finally:
        process.kill()
        process.communicate()


def stored(buffer, traces):
    """Ids of samples of LENGTHS tokens with these traces."""
    settings = {"batch_groups": 1, "group_size": len(traces), "max_staleness": 0, "publish_interval": 1, "epochs": 1}
    buffer.OpenRun(pb.OpenRunRequest(request_id="1", run_id=RUN, seed=0, lineage=common.Lineage(ordinal=0), **settings))
    buffer.PutPrompts(pb.PutPromptsRequest(request_id="2", run_id=RUN, prompts=[build.prompt("p")]))
    buffer.PublishVersion(pb.PublishVersionRequest(request_id="3", version=V0))
    lease = buffer.LeasePrompts(
        pb.LeasePromptsRequest(request_id="4", run_id=RUN, holder="w", incarnation="1", max_prompts=1)
    ).leases[0]
    group = build.group(lease, V0)
    names = []
    for rollout, length, trace in zip(group.rollouts, LENGTHS, traces, strict=True):
        made = sample.Sample(
            sample_id=rollout.samples[0].sample_id,
            segments=[build.prompt_segment(), build.model_segment(V0, range(length - 3))],
            routing=trace,
        )
        rollout.samples[0].CopyFrom(made)
        names.append(made.sample_id)
    buffer.CommitGroup(
        pb.CommitGroupRequest(request_id="5", run_id=RUN, lease_id=lease.lease_id, attempt=lease.attempt, group=group)
    )
    return names


def fetch(buffer, names, rows, layers):
    """Traces of these rows in these layers, each of as many parts as there are ranges of layers."""
    parts = [fetch_part(buffer, names, rows, one) for one in layer_ranges(layers, LAYERS)]
    return [join_layers(of_sample) for of_sample in zip(*parts, strict=True)]


def fetch_part(buffer, names, rows, layers):
    request = pb.FetchSamplesRequest(
        run_id=RUN,
        samples=[
            pb.SampleSelection(
                sample_id=name, routing_rows=[common.IndexRange(start=start, stop=stop) for start, stop in ranges]
            )
            for name, ranges in zip(names, rows, strict=True)
        ],
        fields=[pb.SAMPLE_FIELD_ROUTING],
        routing_layers=common.IndexRange(start=layers[0], stop=layers[1]),
    )
    return [answer.sample.routing for answer in buffer.FetchSamples(request)]


def test_every_rank_receives_its_rows_of_its_layers_only(buffer, make_ids):
    """Two data ranks x two context ranks x two pipeline stages, each of two virtual ones."""
    traces = [
        encode(
            make_ids(n - 1, layers=6, seed=n), layer_ids=LAYERS, experts=8, version=V0, chunk_rows=16, chunk_layers=3
        )
        for n in LENGTHS
    ]
    names, total = stored(buffer, traces), 0
    for mine in ((0, 3), (1, 2)):
        lengths = [LENGTHS[one] for one in mine]
        whole = pack([decode(traces[one]) for one in mine], lengths)
        parts = np.array_split(np.arange(sum(lengths)), 4)
        for places in (np.concatenate([parts[0], parts[3]]), np.concatenate([parts[1], parts[2]])):
            rows = row_ranges(places, lengths)
            needed = [one for one, ranges in zip(mine, rows, strict=True) if ranges]
            rows = [ranges for ranges in rows if ranges]
            for stage in STAGES:
                got = fetch(buffer, [names[one] for one in needed], rows, stage)
                budget = sum(
                    payload_bytes(traces[one].header, ranges, layers)
                    for one, ranges in zip(needed, rows, strict=True)
                    for layers in layer_ranges(stage, LAYERS)
                )
                assert sum(len(trace.inline) for trace in got) == budget > 0
                total += budget
                found = {one: decode(trace, rows=LENGTHS[one] - 1) for one, trace in zip(needed, got, strict=True)}
                ids, valid = take(*pack([found.get(one) for one in mine], lengths), places)
                want = take(*whole, places)
                assert np.array_equal(valid, want[1])
                columns = [LAYERS.index(layer) for layer in stage]
                np.testing.assert_array_equal(ids[valid], want[0][valid][:, columns])
    # Together the ranks received everything once.
    assert total == sum(len(trace.inline) for trace in traces)
