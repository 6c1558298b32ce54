"""Requests of BufferService."""

from __future__ import annotations

import math
from collections.abc import Iterable

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.validate import _fields as fields
from vime_proto.validate._sample import validate_rollout
from vime_proto.validate._sampling import validate_sampling


def validate_lineage(lineage: common.Lineage, field: str = "lineage") -> None:
    """Checks a lineage: an ordinal; parent and fork both or neither; the parent is an earlier one.

    Raises:
        ContractError: names the field.
    """
    ordinal = fields.present(lineage, "ordinal", f"{field}.")
    if lineage.HasField("parent") != lineage.HasField("forked_at"):
        raise ContractError(f"{field}.forked_at", "parent and forked_at must be set together")
    if lineage.HasField("parent") and lineage.parent >= ordinal:
        raise ContractError(f"{field}.parent", f"must be below the ordinal {ordinal}, got {lineage.parent}")


def validate_open_run(request: pb.OpenRunRequest) -> None:
    """Checks the shape of a run; max_staleness must be at least publish_interval - 1, or the run could never go on.

    Raises:
        ContractError: names the field.
    """
    _ids(request, "request_id", "run_id")
    for name in ("batch_groups", "group_size", "publish_interval"):
        fields.at_least(getattr(request, name), 1, name)
    staleness = fields.present(request, "max_staleness", why="must be set; 0 is on-policy")
    if staleness < request.publish_interval - 1:
        raise ContractError(
            "max_staleness",
            f"publishing every {request.publish_interval} batches needs at least {request.publish_interval - 1}, got {staleness}",
        )
    for name in ("max_attempts", "epochs"):
        if request.HasField(name):
            fields.at_least(getattr(request, name), 1, name)
    if not request.HasField("lineage"):
        raise ContractError("lineage", "must be set; a new run starts lineage 0")
    validate_lineage(request.lineage)


def validate_lease_prompts(request: pb.LeasePromptsRequest) -> None:
    """Checks ids, max_prompts >= 1 and wait_seconds.

    Raises:
        ContractError: names the field.
    """
    _ids(request, "request_id", "run_id", "holder", "incarnation")
    fields.at_least(request.max_prompts, 1, "max_prompts")
    fields.wait_seconds(request)


def validate_lease_batch(request: pb.LeaseBatchRequest) -> None:
    """Checks ids and wait_seconds.

    Raises:
        ContractError: names the field.
    """
    _ids(request, "request_id", "run_id", "holder", "incarnation")
    fields.wait_seconds(request)


def validate_renew_leases(request: pb.RenewLeasesRequest) -> None:
    """Checks ids.

    Raises:
        ContractError: names the field.
    """
    _ids(request, "run_id")
    for index, lease in enumerate(request.lease_ids):
        fields.text(lease, f"lease_ids[{index}]")


def validate_put_prompts(request: pb.PutPromptsRequest) -> None:
    """Checks ids and that there are prompts; each prompt is the business of its own status.

    Raises:
        ContractError: names the field.
    """
    _ids(request, "request_id", "run_id")
    if not request.prompts:
        raise ContractError("prompts", "must not be empty")


def validate_commit_group(request: pb.CommitGroupRequest) -> None:
    """Checks the ids of a commit. The group itself is checked with validate_group once its lease is known.

    Raises:
        ContractError: names the field.
    """
    _ids(request, "request_id", "run_id", "lease_id")
    fields.at_least(request.attempt, 1, "attempt")
    if not request.HasField("group"):
        raise ContractError("group", "must be set")


def validate_release_lease(request: pb.ReleaseLeaseRequest) -> None:
    """Checks the ids of a release, and its partial rollouts.

    Raises:
        ContractError: names the field.
    """
    _ids(request, "request_id", "run_id", "lease_id")
    for index, rollout in enumerate(request.partial):
        validate_rollout(rollout, field=f"partial[{index}]")


def validate_fetch_samples(request: pb.FetchSamplesRequest) -> None:
    """Checks selections, fields and ranges.

    Raises:
        ContractError: names the field.
    """
    _ids(request, "run_id")
    for index, selection in enumerate(request.samples):
        fields.text(selection.sample_id, f"samples[{index}].sample_id")
        for r, rows in enumerate(selection.routing_rows):
            fields.index_range(rows, f"samples[{index}].routing_rows[{r}]")
    for index, one in enumerate(request.fields):
        if one not in pb.SampleField.values() or one == pb.SAMPLE_FIELD_UNSPECIFIED:
            raise ContractError(
                f"fields[{index}]", f"unknown value {one}; valid: {', '.join(pb.SampleField.keys()[1:])}"
            )
    if request.HasField("routing_layers"):
        fields.index_range(request.routing_layers, "routing_layers")


def validate_batch_end(request: pb.AckBatchRequest | pb.NackBatchRequest) -> None:
    """Checks the ids of AckBatch and NackBatch.

    Raises:
        ContractError: names the field.
    """
    _ids(request, "request_id", "run_id", "lease_id")


def validate_publish_version(request: pb.PublishVersionRequest) -> None:
    """Checks ids and that the version is whole.

    Raises:
        ContractError: names the field.
    """
    _ids(request, "request_id")
    fields.version(request, "version", "version")


def validate_report_checkpoint(request: pb.ReportCheckpointRequest) -> None:
    """Checks ids and that oldest_restorable is not above batch.

    Raises:
        ContractError: names the field.
    """
    _ids(request, "request_id", "run_id")
    batch, oldest = fields.present(request, "batch"), fields.present(request, "oldest_restorable")
    if oldest > batch:
        raise ContractError("oldest_restorable", f"must not be above batch {batch}, got {oldest}")


def validate_rewind(request: pb.RewindRequest) -> None:
    """Checks ids and that the lineage forks.

    Raises:
        ContractError: names the field.
    """
    _ids(request, "request_id", "run_id")
    fields.present(request, "batch")
    if not request.HasField("lineage"):
        raise ContractError("lineage", "must be set: the lineage that starts here")
    validate_lineage(request.lineage)


def validate_start_evaluation(request: pb.StartEvaluationRequest) -> None:
    """Checks ids, version, sampling overrides (greedy allowed) and deadline.

    Raises:
        ContractError: names the field.
    """
    _ids(request, "request_id", "run_id", "set")
    version = fields.version(request, "version", "version")
    if version.run_id != request.run_id:
        raise ContractError("version.run_id", f"must be the run {request.run_id!r}, got {version.run_id!r}")
    if request.HasField("sampling"):
        validate_sampling(request.sampling, "sampling", evaluation=True, override=True)
    if request.HasField("deadline_seconds") and not (
        math.isfinite(request.deadline_seconds) and request.deadline_seconds > 0
    ):
        raise ContractError("deadline_seconds", f"must be above 0, got {request.deadline_seconds}")


def _ids(request, *names: str) -> None:
    more: Iterable[tuple[str, str]] = [(name, "must not be empty") for name in names if not getattr(request, name)]
    if more:
        (field, description), *rest = more
        raise ContractError(field, description, rest)
