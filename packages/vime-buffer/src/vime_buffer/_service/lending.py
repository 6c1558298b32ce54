"""PutPrompts, LeasePrompts, RenewLeases, ReleaseLease."""

from __future__ import annotations

import grpc

from vime_buffer._service.core import Core
from vime_buffer._service.grants import Grants
from vime_buffer._store import counters, evaluations, granting, leases, prompts, requests, runs
from vime_buffer._store.database import Transaction
from vime_buffer._store.granting import Grant
from vime_buffer._store.schema import LeaseKind, PromptState, Purpose
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.common.v1 import common_pb2
from vime_proto.errors import ContractError
from vime_proto.sample.v1 import sample_pb2
from vime_proto.validate import (
    validate_lease_prompts,
    validate_prompt,
    validate_put_prompts,
    validate_release_lease,
    validate_renew_leases,
)

_INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]
_EXISTS = grpc.StatusCode.ALREADY_EXISTS.value[0]
# A hook that fails on every row must not be called in a tight loop.
_PAUSE_AFTER_BAD_ROWS = 1.0


class LendingCalls:
    """Calls of rollout workers about prompts."""

    core: Core
    grants: Grants

    async def PutPrompts(self, request: pb.PutPromptsRequest, context) -> pb.PutPromptsResponse:
        validate_put_prompts(request)
        faults = [self._fault(prompt, index) for index, prompt in enumerate(request.prompts)]

        def put(tx: Transaction) -> pb.PutPromptsResponse:
            run = runs.get(tx, request.run_id)
            good = [prompt for prompt, fault in zip(request.prompts, faults, strict=True) if not fault]
            new, messages = prompts.put(tx, run, good)
            prompts.insert(tx, run, new)
            response = pb.PutPromptsResponse()
            taken = iter(messages)
            for fault in faults:
                clash = "" if fault else next(taken)
                code = _INVALID if fault else _EXISTS if clash else 0
                response.statuses.append(common_pb2.ItemStatus(code=code, message=fault or clash))
            return response

        return await self.core.once(request, request.run_id, pb.PutPromptsResponse, put)

    def _fault(self, prompt: sample_pb2.Prompt, index: int) -> str:
        field = f"prompts[{index}]"
        try:
            validate_prompt(prompt, field)
            if len(prompt.prompt_id) > 255:
                raise ContractError(f"{field}.prompt_id", "at most 255 characters")
            if self.core.source.makes(prompt.prompt_id):
                raise ContractError(
                    f"{field}.prompt_id", f"{prompt.prompt_id!r} is the id of a row of the prompt files"
                )
        except ContractError as error:
            return str(error)
        return ""

    async def LeasePrompts(self, request: pb.LeasePromptsRequest, context) -> pb.LeasePromptsResponse:
        validate_lease_prompts(request)
        digest = requests.fingerprint(request)
        # An evaluation may follow the last batch, after a checkpoint of any length: nobody is sent away before CloseRun.
        may_end = not self.core.evaluation_sets

        async def look(last: bool) -> pb.LeasePromptsResponse:
            response = await once()
            if last and may_end and response.outcome == pb.LEASE_OUTCOME_EMPTY and await self._ended(request.run_id):
                response.outcome = pb.LEASE_OUTCOME_END_OF_DATA
            return response

        async def once() -> pb.LeasePromptsResponse:
            while True:
                seen = self.core.changes.count
                shortage = [0]
                response = await self.core.once(
                    request,
                    request.run_id,
                    pb.LeasePromptsResponse,
                    lambda tx: self._lease(tx, request, shortage),  # noqa: B023
                    digest,
                    lambda response: response.outcome == pb.LEASE_OUTCOME_GRANTED,
                )
                if response.outcome != pb.LEASE_OUTCOME_EMPTY or not shortage[0]:
                    return response
                if not await self._refill(request.run_id, shortage[0], seen):
                    return response

        return await self.grants.poll(request, look)

    async def _ended(self, run_id: str) -> bool:
        """Whether every prompt there is was trained on, filtered or dropped, and no evaluation is open."""

        def look(tx: Transaction) -> bool:
            run = runs.get(tx, run_id)
            return (
                granting.train_data_seen(tx, run.run_id)
                and self.core.source.exhausted(run.source_position, run.epochs)
                and not granting.train_data_left(tx, run_id)
                and not granting.groups_left(tx, run_id)
                and not evaluations.open_evaluations(tx, run_id)
            )

        return await self.core.work(self.core.database.read, look)

    def _lease(self, tx: Transaction, request: pb.LeasePromptsRequest, shortage: list[int]) -> pb.LeasePromptsResponse:
        run = runs.get(tx, request.run_id)
        leases.lapse(tx, run.run_id)
        leases.enter(tx, run.run_id, LeaseKind.PROMPT, request.holder, request.incarnation)
        grant: Grant = granting.lease_prompts(
            tx, run, request.holder, request.incarnation, request.max_prompts, self.core.ttl
        )
        shortage[0] = grant.shortage
        return grant.response

    async def _refill(self, run_id: str, wanted: int, seen: int) -> bool:
        """Takes prompts from the source; answers whether the queue may hold more than before."""
        async with self.core.reading[run_id]:
            if self.core.changes.count != seen:
                return True
            run, again = await self.core.work(
                self.core.database.read, lambda tx: (runs.get(tx, run_id), prompts.unformatted(tx, run_id, wanted))
            )
            seed = None if run.seed is None else int(run.seed)
            fresh = await self.core.work(self.core.source.read, run.source_position, wanted, seed, run.epochs)
            retried = await self.core.work(lambda: [self.core.source.again(prompt) for prompt in again])
            if not (fresh or retried):
                return False

            def store(tx: Transaction) -> None:
                now = runs.get(tx, run_id)
                for one in retried:
                    prompts.reformat(tx, now, one)
                prompts.insert(tx, now, fresh)
                runs.update(tx, run_id, source_position=now.source_position + len(fresh))
                counters.add(tx, run_id, counters.READ, len(fresh))

            await self.core.database.run(store)
            useful = any(one.formatted for one in (*fresh, *retried))
            if not useful:
                await self.core.changes.wait(self.core.changes.count, _PAUSE_AFTER_BAD_ROWS)
            return useful

    async def RenewLeases(self, request: pb.RenewLeasesRequest, context) -> pb.RenewLeasesResponse:
        validate_renew_leases(request)

        def renew(tx: Transaction) -> pb.RenewLeasesResponse:
            directives = leases.renew(tx, runs.get(tx, request.run_id), list(request.lease_ids), self.core.ttl)
            return pb.RenewLeasesResponse(directives=directives, ttl_seconds=self.core.ttl)

        return await self.core.database.run(renew)

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context) -> pb.ReleaseLeaseResponse:
        validate_release_lease(request)
        return await self.core.once(
            request, request.run_id, pb.ReleaseLeaseResponse, lambda tx: self._release(tx, request)
        )

    def _release(self, tx: Transaction, request: pb.ReleaseLeaseRequest) -> pb.ReleaseLeaseResponse:
        run = runs.get(tx, request.run_id)
        lease = leases.find_open(tx, run.run_id, request.lease_id, LeaseKind.PROMPT)
        leases.end(tx, [lease.lease_id], "released")
        kept = pb.PromptLease(partial=request.partial).SerializeToString() if request.partial else None
        dropped = False
        if request.failed:
            reason = request.reason or "released as failed"
            dropped = prompts.fail(tx, run, lease.target, reason, partial=kept)
        else:
            prompts.set_state(tx, run.run_id, [lease.target], PromptState.PENDING, partial=kept)
        if dropped and lease.purpose == Purpose.EVALUATE:
            evaluations.give_up(tx, run.run_id, lease.target)
        tx.changed = True
        return pb.ReleaseLeaseResponse()
