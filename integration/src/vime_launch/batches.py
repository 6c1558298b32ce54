"""Rollout only: whole groups leave a run as files, which ``vime-trainer rl`` trains on with its key ``import_batches``.

A folder holds one folder a batch, named by its ordinal, with ``groups.binpb``: ``vime.sample.v1.Group`` messages, each after its
length (uint64, little-endian).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vime_launch.recipe import Recipe
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.buffer.v1 import buffer_pb2_grpc
from vime_proto.channel import call, open_channel
from vime_proto.common.v1 import common_pb2
from vime_proto.sample.v1 import sample_pb2
from vime_proto.version import policy_version

_LENGTH = struct.Struct("<Q")
_WAIT_SECONDS = 5.0
# A batch's index says that a rollout failed, and no more.
_LOST_FAILURE = sample_pb2.Failure(stage="unknown", message="failed before the batch was exported")


def _id() -> str:
    return os.urandom(12).hex()


def write_batch(folder: Path, lease: pb.LeaseBatchResponse, groups: Iterable[sample_pb2.Group]) -> Path:
    """Writes one batch to ``<folder>/<ordinal>/groups.binpb``, whole or not at all."""
    target = folder / f"{lease.ordinal:06d}"
    target.mkdir(parents=True, exist_ok=True)
    partial = target / ".groups.partial"
    with partial.open("wb") as file:
        for group in groups:
            data = group.SerializeToString(deterministic=True)
            file.write(_LENGTH.pack(len(data)) + data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, target / "groups.binpb")
    (target / "batch.json").write_text(json.dumps({"batch_id": lease.batch_id, "ordinal": lease.ordinal}) + "\n")
    return target


async def export_batches(recipe: Recipe, address: str, folder: Path) -> int:
    """Opens the run, lets the workers fill batches, and writes them; answers the batches written.

    The weights never change here, so the batches may lag behind one another by as many as there are.
    """
    export = recipe.export_batches
    assert export is not None
    run_id = recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    async with open_channel(address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        opened = await call(
            stub.OpenRun,
            pb.OpenRunRequest(
                request_id=_id(),
                run_id=run_id,
                batch_groups=export.batch_groups,
                group_size=export.group_size,
                max_staleness=export.batches - 1,
                seed=export.seed,
                lineage=common_pb2.Lineage(ordinal=0),
                publish_interval=1,
            ),
        )
        if not opened.HasField("version"):
            request = pb.PublishVersionRequest(request_id=_id(), version=policy_version(run_id, 0, 0))
            await call(stub.PublishVersion, request)
        trained, incarnation = opened.trained, _id()
        while trained < export.batches:
            lease = await call(
                stub.LeaseBatch,
                pb.LeaseBatchRequest(
                    request_id=_id(),
                    run_id=run_id,
                    holder="vime-export",
                    incarnation=incarnation,
                    wait_seconds=_WAIT_SECONDS,
                ),
                timeout=_WAIT_SECONDS + 30,
            )
            if lease.outcome == pb.LEASE_OUTCOME_END_OF_DATA:
                break
            if lease.outcome != pb.LEASE_OUTCOME_GRANTED:
                continue
            groups = await _fetch(stub, run_id, lease)
            write_batch(folder, lease, groups)
            trained = (
                await call(stub.AckBatch, pb.AckBatchRequest(request_id=_id(), run_id=run_id, lease_id=lease.lease_id))
            ).trained
    return trained


async def _fetch(stub: Any, run_id: str, lease: pb.LeaseBatchResponse) -> list[sample_pb2.Group]:
    """The groups of a leased batch, with all their samples. Of the prompt only the id is known."""
    wanted = [sample.sample_id for group in lease.groups for rollout in group.rollouts for sample in rollout.samples]
    samples: dict[str, sample_pb2.Sample] = {}
    request = pb.FetchSamplesRequest(run_id=run_id, samples=[pb.SampleSelection(sample_id=one) for one in wanted])
    async for answer in stub.FetchSamples(request):
        if answer.status.code:
            raise RuntimeError(f"batch {lease.batch_id}: {answer.status.message}")
        samples[answer.sample.sample_id] = answer.sample
    missing = set(wanted) - set(samples)
    if missing:
        raise RuntimeError(f"batch {lease.batch_id}: the buffer did not send {', '.join(sorted(missing))}")
    return [
        sample_pb2.Group(
            group_id=group.group_id,
            prompt=sample_pb2.Prompt(prompt_id=group.prompt_id, text=group.prompt_id),
            rollouts=[
                sample_pb2.Rollout(
                    rollout_id=rollout.rollout_id,
                    attempt=group.attempt,
                    status=rollout.status,
                    failure=_LOST_FAILURE if rollout.status == sample_pb2.ROLLOUT_STATUS_FAILED else None,
                    rewards=rollout.rewards,
                    reward=rollout.reward if rollout.HasField("reward") else None,
                    reliable=rollout.reliable,
                    samples=[samples[sample.sample_id] for sample in rollout.samples],
                )
                for rollout in group.rollouts
            ],
        )
        for group in lease.groups
    ]


async def is_closed(address: str, run_id: str) -> bool:
    """Whether the run was closed."""
    async with open_channel(address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        return (await call(stub.GetStats, pb.GetStatsRequest(run_id=run_id), timeout=5)).closed


async def is_over(address: str, run_id: str) -> bool:
    """Whether the buffer has, for ever, no prompt to hand out: then a worker that ends is no fault."""
    if await is_closed(address, run_id):
        return True
    async with open_channel(address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        request = pb.LeasePromptsRequest(
            request_id=_id(), run_id=run_id, holder="vime-launch", incarnation=_id(), max_prompts=1
        )
        answer = await call(stub.LeasePrompts, request, timeout=5)
        for lease in answer.leases:
            release = pb.ReleaseLeaseRequest(
                request_id=_id(), run_id=run_id, lease_id=lease.lease_id, reason="asked whether prompts are left"
            )
            await call(stub.ReleaseLease, release, timeout=5)
        return answer.outcome == pb.LEASE_OUTCOME_END_OF_DATA
