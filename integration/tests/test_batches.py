"""Rollout only, against the in-memory buffer, with a worker that only fills in groups."""

from __future__ import annotations

import asyncio
import struct

import grpc
import pytest

from vime_launch.batches import export_batches, is_closed, is_over
from vime_launch.recipe import check_recipe
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.buffer.v1 import buffer_pb2_grpc
from vime_proto.channel import call, open_channel
from vime_proto.fakes import FakeBuffer, build, serve
from vime_proto.sample.v1 import sample_pb2

RECIPE = check_recipe(
    {"name": "r1", "buffer": {}, "engine": {}, "worker": {}, "export_batches": {"batches": 2, "batch_groups": 2, "group_size": 2}}
)


def groups_in(path) -> list[sample_pb2.Group]:
    data, found = path.read_bytes(), []
    while data:
        (size,) = struct.unpack_from("<Q", data)
        found.append(sample_pb2.Group.FromString(data[8 : 8 + size]))
        data = data[8 + size :]
    return found


async def answer(stub, count: int) -> list[sample_pb2.Group]:
    """A worker: answers ``count`` prompts."""
    done: list[sample_pb2.Group] = []
    while len(done) < count:
        request = pb.LeasePromptsRequest(
            request_id=f"lease-{len(done)}-{asyncio.get_running_loop().time()}",
            run_id="r1", holder="w", incarnation="1", max_prompts=1, wait_seconds=1.0,
        )  # fmt: skip
        try:
            leased = await call(stub.LeasePrompts, request)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND, "only until the run is open"
            await asyncio.sleep(0.05)
            continue
        for lease in leased.leases:
            group = build.group(lease, lease.minimum_version)
            commit = pb.CommitGroupRequest(
                request_id=lease.lease_id, run_id="r1", lease_id=lease.lease_id, attempt=lease.attempt, group=group
            )
            await call(stub.CommitGroup, commit)
            done.append(group)
    return done


async def test_batches_are_written_whole_and_acked(tmp_path):
    prompts = [build.prompt(f"p{i}") for i in range(8)]
    async with serve(FakeBuffer(source=prompts)) as server, open_channel(server.address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        written, answered = await asyncio.gather(export_batches(RECIPE, server.address, tmp_path), answer(stub, 4))
        assert written == 2
        found = [group for name in ("000000", "000001") for group in groups_in(tmp_path / name / "groups.binpb")]
        assert {one.group_id for one in found} == {one.group_id for one in answered}
        given = {one.group_id: one for one in answered}
        for group in found:
            assert list(group.rollouts[0].samples) == list(given[group.group_id].rollouts[0].samples)
            assert [one.reward for one in group.rollouts] == [one.reward for one in given[group.group_id].rollouts]
        stats = await stub.GetStats(pb.GetStatsRequest(run_id="r1"))
        assert stats.batches_trained == 2
        # Done already: another call writes nothing anew.
        assert await export_batches(RECIPE, server.address, tmp_path) == 2


async def test_whether_prompts_are_left(tmp_path):
    async with serve(FakeBuffer(source=[build.prompt("p0")])) as server, open_channel(server.address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="r1"):
            await is_closed(server.address, "r1")
        task = asyncio.create_task(export_batches(RECIPE, server.address, tmp_path))
        await asyncio.wait_for(_published(stub), 10)
        assert not await is_over(server.address, "r1")
        await stub.CloseRun(pb.CloseRunRequest(request_id="c", run_id="r1", reason="stopped"))
        assert await is_closed(server.address, "r1") and await is_over(server.address, "r1")
        assert await task == 0


async def _published(stub) -> None:
    """Returns once the run is open and has a version."""
    while True:
        try:
            if (await stub.GetStats(pb.GetStatsRequest(run_id="r1"))).HasField("version"):
                return
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND
        await asyncio.sleep(0.02)
