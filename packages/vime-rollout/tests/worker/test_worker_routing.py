"""Expert routes travel with the group, or as blobs when they are large."""

from __future__ import annotations

import numpy as np
import pytest
from worker_models import RUN, STOP, delta

from vime_proto.buffer.v1 import buffer_pb2
from vime_proto.fakes import build
from vime_proto.validate import validate_sample
from vime_proto.version import policy_version
from vime_r3.trace import decode


async def routed(request, seen):
    assert request.return_routing
    rows = request.prompt_token_ids.shape[0] + 2 - 1
    ids = np.zeros((rows, 2, 2), np.uint8)
    ids[:, :, 0] = np.arange(rows)[:, None] % 8
    ids[:, :, 1] = (ids[:, :, 0] + 1) % 8
    yield delta([5], 0)
    yield delta([2], 0, STOP, routing=build.trace(ids, policy_version(RUN, 0, 0), experts=8))


@pytest.mark.parametrize(("inline_mib", "payload"), [(64, "inline"), (0, "blob_id")])
async def test_routes_reach_whoever_fetches_the_sample(stage, prompts, inline_mib, payload):
    one = await stage(routed, prompts[:1], route_capture=True, inline_routing_mib=inline_mib)
    await one.open_run(batch_groups=1)
    one.worker()
    batch = await one.batch()
    (group,) = await one.groups(batch)
    assert {r.samples[0].routing.WhichOneof("payload") for r in group.rollouts} == {payload}
    wanted = [buffer_pb2.SampleSelection(sample_id=r.samples[0].sample_id) for r in batch.groups[0].rollouts]
    request = buffer_pb2.FetchSamplesRequest(run_id=RUN, samples=wanted)
    fetched = [answer.sample async for answer in one.stub.FetchSamples(request)]
    assert len(fetched) == 2
    for sample in fetched:
        validate_sample(sample)
        rows = sum(segment.token_ids.shape[0] for segment in sample.segments) - 1
        assert sample.routing.header.rows == rows and not sample.routing.header.holes
        assert (decode(sample.routing).ids[:, 0, 0] == np.arange(rows) % 8).all()
    one.stop.set()
