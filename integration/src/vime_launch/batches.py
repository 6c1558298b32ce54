"""Rollout only and train only: whole groups leave a run as files, and enter another run as if a worker had made them.

An exported folder holds ``manifest.json`` and one ``batch-<ordinal>.binpb`` a batch: ``vime.sample.v1.Group`` messages, each after its length
as a varint (the protobuf delimited form).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import proto
from google.protobuf.message import DecodeError

from vime_launch.plan import RunFolder
from vime_launch.recipe import Recipe, RecipeError, check_recipe
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.buffer.v1 import buffer_pb2_grpc
from vime_proto.channel import call, open_channel
from vime_proto.common.v1 import common_pb2
from vime_proto.sample.v1 import sample_pb2
from vime_proto.settings import merge
from vime_proto.version import policy_version, show

FORMAT = "vime-groups-1"
_MANIFEST = "manifest.json"
_WAIT_SECONDS = 5.0
_LEASE_AT_ONCE = 32


def _id() -> str:
    return os.urandom(12).hex()


def write_batch(folder: Path, ordinal: int, groups: Iterable[sample_pb2.Group]) -> Path:
    """Writes one batch, whole or not at all."""
    path = folder / f"batch-{ordinal:06d}.binpb"
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for group in groups:
            proto.serialize_length_prefixed(group, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path


def read_groups(folder: Path) -> Iterator[sample_pb2.Group]:
    """The groups of an exported folder, batch by batch.

    Raises:
        RecipeError: a file that ends within a message.
    """
    for path in sorted(folder.glob("batch-*.binpb")):
        with path.open("rb") as file:
            while True:
                try:
                    group = proto.parse_length_prefixed(sample_pb2.Group, file)
                except (ValueError, DecodeError) as error:
                    raise RecipeError(f"{path}: cut off or no batch: {error}") from None
                if group is None:
                    break
                yield group


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an exported folder.

    Raises:
        RecipeError: there is none, or it is of another format.
    """
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RecipeError(f"import_batches.path: {folder} is no exported folder: {error}") from None
    if manifest.get("format") != FORMAT:
        raise RecipeError(f"import_batches.path: {path} is of format {manifest.get('format')!r}; {FORMAT!r} is read")
    return manifest


def versions_of(group: sample_pb2.Group) -> set[str]:
    """The policy versions that produced a group, as ``run/lineage:number``."""
    return {show(segment.generation.version) for segment in _generated(group)}


def _generated(group: sample_pb2.Group) -> Iterator[sample_pb2.Segment]:
    for rollout in group.rollouts:
        for sample in rollout.samples:
            yield from (segment for segment in sample.segments if segment.HasField("generation"))


async def export_batches(recipe: Recipe, address: str, folder: Path) -> int:
    """Opens the run, lets the workers fill batches, and writes them; answers the groups written.

    The weights never change here, so the batches may lag behind one another by as many as there are.
    """
    export = recipe.export_batches
    assert export is not None
    run_id = recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    versions: set[str] = set()
    count = 0
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
            write_batch(folder, lease.ordinal, groups)
            trained = (
                await call(stub.AckBatch, pb.AckBatchRequest(request_id=_id(), run_id=run_id, lease_id=lease.lease_id))
            ).trained
    for group in read_groups(folder):
        versions |= versions_of(group)
        count += 1
    manifest = {
        "format": FORMAT,
        "run_id": run_id,
        "batches": trained,
        "groups": count,
        "batch_groups": export.batch_groups,
        "group_size": export.group_size,
        "versions": sorted(versions),
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return count


async def _fetch(stub: Any, run_id: str, lease: pb.LeaseBatchResponse) -> list[sample_pb2.Group]:
    """The groups of a leased batch, with all their samples."""
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
            prompt=sample_pb2.Prompt(prompt_id=group.prompt_id),
            rollouts=[
                sample_pb2.Rollout(
                    rollout_id=rollout.rollout_id,
                    attempt=group.attempt,
                    status=rollout.status,
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


def prepare_import(recipe: Recipe, folder: RunFolder) -> Recipe:
    """The recipe of a train-only run whose buffer hands out one prompt for each imported group, once.

    Raises:
        RecipeError: no exported folder, groups of several versions, or a staleness bound that the later batches would break.
    """
    assert recipe.import_batches is not None and recipe.buffer is not None and recipe.trainer is not None
    source = Path(recipe.import_batches.path)
    manifest = read_manifest(source)
    if len(manifest["versions"]) != 1:
        found = ", ".join(manifest["versions"]) or "none"
        raise RecipeError(f"import_batches.path: {source} holds versions {found}; one version, of the model that training starts from, is needed")
    bound = max(0, manifest["batches"] - 1)
    given = recipe.trainer.config.get("max_staleness", bound)
    if given < bound:
        raise RecipeError(f"trainer.config.max_staleness: {given} is too small for {manifest['batches']} batches of one version; give {bound}")
    rows = folder / "import.jsonl"
    with rows.open("w") as file:
        for group in read_groups(source):
            file.write(json.dumps({"text": f"imported group {group.group_id}", "group": group.group_id}) + "\n")
    values = recipe.model_dump(mode="json", exclude_none=True)
    own = {
        "buffer": {"config": {"prompts": [{"path": str(rows), "format": "jsonl", "text_field": "text"}]}},
        "trainer": {"config": {"max_staleness": given}},
    }
    return check_recipe(merge(values, own))


async def import_groups(recipe: Recipe, address: str) -> None:
    """Answers every prompt of a train-only run with its imported group, until there are no more."""
    assert recipe.import_batches is not None
    groups = {group.group_id: group for group in read_groups(Path(recipe.import_batches.path))}
    run_id, incarnation = recipe.name, _id()
    async with open_channel(address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        while True:
            request = pb.LeasePromptsRequest(
                request_id=_id(),
                run_id=run_id,
                holder="vime-import",
                incarnation=incarnation,
                max_prompts=_LEASE_AT_ONCE,
                wait_seconds=_WAIT_SECONDS,
            )
            try:
                answer = await call(stub.LeasePrompts, request, timeout=_WAIT_SECONDS + 30)
            except grpc.RpcError as error:
                # Until the trainer has opened the run.
                if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
                    raise
                await asyncio.sleep(0.2)
                continue
            if answer.outcome == pb.LEASE_OUTCOME_END_OF_DATA:
                return
            for lease in answer.leases:
                name = json.loads(lease.prompt.record_json)["group"]
                commit = pb.CommitGroupRequest(
                    request_id=_id(),
                    run_id=run_id,
                    lease_id=lease.lease_id,
                    attempt=lease.attempt,
                    group=as_answer(groups[name], lease, run_id),
                )
                await call(stub.CommitGroup, commit)


def as_answer(group: sample_pb2.Group, lease: pb.PromptLease, run_id: str) -> sample_pb2.Group:
    """The imported group as the answer to a lease: made by the model that this run starts from."""
    answer = sample_pb2.Group(group_id=lease.prompt.prompt_id, prompt=lease.prompt)
    answer.rollouts.extend(group.rollouts)
    for rollout in answer.rollouts:
        rollout.attempt = lease.attempt
    for segment in _generated(answer):
        segment.generation.version.CopyFrom(policy_version(run_id, 0, 0))
    for rollout in answer.rollouts:
        for sample in rollout.samples:
            for span in sample.routing.header.spans:
                span.version.CopyFrom(policy_version(run_id, 0, 0))
    return answer


async def is_over(address: str, run_id: str) -> bool:
    """Whether the buffer has, for ever, no prompt to hand out: then a worker that ends is no fault."""
    async with open_channel(address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        if (await call(stub.GetStats, pb.GetStatsRequest(run_id=run_id), timeout=5)).closed:
            return True
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
