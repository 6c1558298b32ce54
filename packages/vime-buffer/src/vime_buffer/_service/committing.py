"""CommitGroup."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re

from vime_buffer._intake import Intake, SamplePayload, take_in
from vime_buffer._loading import HookError, apply_filter
from vime_buffer._service.core import Core
from vime_buffer._store import evaluations, groups, requests
from vime_buffer._store.database import Transaction
from vime_buffer._store.groups import CommitContext, Verdict
from vime_buffer._store.payloads import SampleRow
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.errors import ContractError, StatusError
from vime_proto.sample.v1 import sample_pb2
from vime_proto.validate import validate_commit_group, validate_group

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Prepared:
    digest: bytes
    intake: Intake
    verdict: Verdict
    rows: list[SampleRow]


class CommitCalls:
    """The call that hands a group in."""

    core: Core

    async def CommitGroup(self, request: pb.CommitGroupRequest, context) -> pb.CommitGroupResponse:
        validate_commit_group(request)
        requests.check_request_id(request.request_id)
        # Goes on when the caller is gone: half a commit would leave files that nobody names.
        return await asyncio.shield(self.core.finish(self._commit(request)))

    async def _commit(self, request: pb.CommitGroupRequest) -> pb.CommitGroupResponse:
        prepared = await self.core.work(self._prepare, request)
        if isinstance(prepared, pb.CommitGroupResponse):
            return prepared
        taken = [False]

        def commit(tx: Transaction) -> pb.CommitGroupResponse:
            context = groups.open_commit(tx, request)
            taken[0] = True
            if context.evaluation:
                return evaluations.commit(tx, context, prepared.intake, request.group)
            return groups.commit(tx, context, prepared.intake, prepared.verdict, prepared.rows)

        try:
            return await self.core.once(request, request.run_id, pb.CommitGroupResponse, commit, prepared.digest)
        except BaseException:
            taken[0] = False
            raise
        finally:
            if not taken[0]:
                await self.core.work(self.core.files.delete, _paths(prepared.rows))

    def _prepare(self, request: pb.CommitGroupRequest) -> _Prepared | pb.CommitGroupResponse:
        """The first answer, if there is one; else what the group's content decides. Raises what refuses it; changes nothing."""
        method = pb.CommitGroupRequest.DESCRIPTOR.name
        digest = requests.fingerprint(request)

        def look(tx: Transaction) -> CommitContext | pb.CommitGroupResponse:
            try:
                return groups.open_commit(tx, request)
            except StatusError:
                # The lease of a repeated commit has ended; its first answer stands.
                first = requests.recall(tx, request.run_id, method, request.request_id, digest, pb.CommitGroupResponse)
                if first is None:
                    raise
                return first

        context = self.core.database.read(look)
        if isinstance(context, pb.CommitGroupResponse):
            return context
        self._check(request.group, context)
        intake = take_in(request.group, request.attempt)
        if context.evaluation:
            return _Prepared(digest, intake, Verdict(pb.COMMIT_OUTCOME_EVALUATED), [])
        verdict = self._judge(request.group, intake)
        keep = verdict.outcome == pb.COMMIT_OUTCOME_READY
        return _Prepared(digest, intake, verdict, self._write(intake.payloads, keep))

    def _check(self, group: sample_pb2.Group, context: CommitContext) -> None:
        if group.group_id != context.lease.target:
            raise ContractError(
                "group.group_id", f"the lease is for prompt {context.lease.target!r}, got {group.group_id!r}"
            )
        try:
            # An evaluation, too, states versions and log-probs; only its sampling may be greedy.
            validate_group(group, group_size=context.group_size, evaluation=context.evaluation)
        except ContractError as error:
            raise _with_ids(error, group) from None
        for i, rollout in enumerate(group.rollouts):
            for j, sample in enumerate(rollout.samples):
                self._check_sample(sample, f"group.rollouts[{i}].samples[{j}]", context.run.run_id)

    def _check_sample(self, sample: sample_pb2.Sample, field: str, run_id: str) -> None:
        if len(sample.sample_id) > 255:
            raise ContractError(f"{field}.sample_id", f"at most 255 characters, got {len(sample.sample_id)}")
        if sample.routing.WhichOneof("payload") == "uri":
            self.core.files.check_uri(sample.routing.uri, f"{field}.routing.uri")
        for k, segment in enumerate(sample.segments):
            version = segment.generation.version
            if segment.generation.HasField("version") and version.run_id != run_id:
                raise ContractError(
                    f"{field}.segments[{k}].generation.version.run_id",
                    f"must be the run {run_id!r}, got {version.run_id!r} (sample {sample.sample_id!r})",
                )

    def _judge(self, group: sample_pb2.Group, intake: Intake) -> Verdict:
        failed = len(intake.failures)
        if failed > self.core.settings.max_failed_rollouts or failed == len(group.rollouts):
            stage, message = intake.failures[0]
            return Verdict(
                pb.COMMIT_OUTCOME_RETRY,
                f"{failed} of {len(group.rollouts)} rollouts failed; the first at {stage!r}: {message}",
            )
        try:
            decision = apply_filter(self.core.filter, self.core.filter_name, group)
        except HookError as error:
            log.error("%s", error, exc_info=error.__cause__)
            return Verdict(pb.COMMIT_OUTCOME_RETRY, str(error))
        if decision.keep:
            return Verdict(pb.COMMIT_OUTCOME_READY)
        return Verdict(pb.COMMIT_OUTCOME_FILTERED, decision.reason, decision.reason)

    def _write(self, payloads: list[SamplePayload], keep: bool) -> list[SampleRow]:
        rows: list[SampleRow] = []
        limit = self.core.settings.inline_bytes
        try:
            for one in payloads:
                big_body = keep and len(one.body) > limit
                big_trace = keep and one.trace is not None and len(one.trace) > limit
                rows.append(
                    SampleRow(
                        sample_id=one.sample_id,
                        size=len(one.body) + one.routing_bytes,
                        body=None if big_body else one.body,
                        body_file=self.core.files.write(one.body) if big_body else None,
                        trace=None if big_trace else one.trace,
                        trace_file=self.core.files.write(one.trace) if big_trace else None,
                        trace_blob=one.blob_id,
                        trace_uri=one.uri,
                    )
                )
        except BaseException:
            self.core.files.delete(_paths(rows))
            raise
        return rows


_PLACE = re.compile(r"rollouts\[(\d+)\](?:\.samples\[(\d+)\])?")


def _with_ids(error: ContractError, group: sample_pb2.Group) -> ContractError:
    """The same error, naming the rollout or sample that it is about where it does not yet."""
    named = []
    for field, description in error.violations:
        place = _PLACE.search(field)
        owner = group.rollouts[int(place[1])] if place else group
        name = owner.rollout_id if place else group.group_id
        if place and place[2] is not None:
            name = owner.samples[int(place[2])].sample_id
        named.append((field, description if repr(name) in description else f"{description} ({name!r})"))
    (field, description), *more = named
    return ContractError(field, description, more)


def _paths(rows: list[SampleRow]) -> list[str]:
    return [file.path for row in rows for file in (row.body_file, row.trace_file) if file is not None]
