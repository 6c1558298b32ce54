"""The loop of a worker: lease, run groups at once, renew, commit; give everything back when it is stopped."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from vime_proto.buffer.v1 import buffer_pb2
from vime_proto.errors import describe
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_rollout.worker._buffer import BufferClient
from vime_rollout.worker._group import GroupRun

log = logging.getLogger(__name__)
_GATHER_SECONDS = 0.01
_STOP_SECONDS = 3.0
_SHORTEST_RENEWAL, _LONGEST_RENEWAL = 0.05, 20.0


class Worker:
    """Answers prompts until the data ends or it is stopped.

    Args:
        buffer: where prompts come from and groups go.
        start_group: makes the work on a lease.
        max_groups: groups in flight at once.
        wait_seconds: length of one long poll.
    """

    def __init__(
        self,
        buffer: BufferClient,
        start_group: Callable[[buffer_pb2.PromptLease], GroupRun],
        max_groups: int,
        wait_seconds: float = 10.0,
    ):
        self._buffer = buffer
        self._start_group = start_group
        self._max_groups, self._wait_seconds = max_groups, wait_seconds
        self._runs: dict[str, tuple[GroupRun, asyncio.Task]] = {}
        self._free = asyncio.Event()
        self._renew_now = asyncio.Event()
        self._aborted: set[str] = set()
        # Leases whose outcome is on its way to the buffer: it ends them by itself, so that an abort says nothing new.
        self._ending: set[str] = set()
        self._stopping = False
        self._unstarted: list[buffer_pb2.PromptLease] = []
        self._ttl = _LONGEST_RENEWAL * 3
        self.counters: collections.Counter[str] = collections.Counter()

    async def run(self, stop: asyncio.Event) -> None:
        """Works until END_OF_DATA or until ``stop`` is set; then every lease is committed or given back.

        Raises:
            FatalError: the buffer is gone for too long, or refuses this worker.
        """
        leasing = asyncio.create_task(self._lease_all())
        renewing = asyncio.create_task(self._renew_all())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({leasing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if leasing.done():
                leasing.result()
        finally:
            self._stopping = True
            self._free.set()
            for _, task in self._runs.values():
                task.cancel()
            # A poll under way may still be granted something, which nobody would hear of: let it end.
            await asyncio.wait({leasing}, timeout=_STOP_SECONDS)
            for task in (leasing, stopping):
                task.cancel()
            await asyncio.gather(leasing, stopping, return_exceptions=True)
            await self._give_back("the worker was stopped")
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def _lease_all(self) -> None:
        while not self._stopping:
            while len(self._runs) >= self._max_groups and not self._stopping:
                self._free.clear()
                await self._free.wait()
                # Groups tend to end together: one call for all of them.
                await asyncio.sleep(_GATHER_SECONDS)
            answer = await self._buffer.lease(self._max_groups - len(self._runs), self._wait_seconds)
            if self._stopping:
                self._unstarted.extend(answer.leases)
                return
            for lease in answer.leases:
                self._begin(lease)
            if answer.outcome == buffer_pb2.LEASE_OUTCOME_END_OF_DATA:
                if not self._runs:
                    return
                # A closed run has no use for what is in flight: ask what to do with it. A failed group may come again.
                self._renew_now.set()
                self._free.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._wait_seconds):
                        await self._free.wait()

    def _begin(self, lease: buffer_pb2.PromptLease) -> None:
        run = self._start_group(lease)
        if 0 < lease.ttl_seconds < self._ttl:
            # The renewal under way waits by the longer time: it must not come too late for this lease.
            self._ttl = lease.ttl_seconds
            self._renew_now.set()
        task = asyncio.create_task(self._work(run))
        self._runs[lease.lease_id] = run, task
        self.counters["groups_leased"] += 1

    async def _work(self, run: GroupRun) -> None:
        lease = run.lease
        try:
            group = await run.run()
            for rollout in group.rollouts:
                self.counters["rollouts"] += 1
                self.counters["rollouts_failed"] += rollout.status == pb.ROLLOUT_STATUS_FAILED
                if rollout.status == pb.ROLLOUT_STATUS_FAILED:
                    log.warning(
                        "rollout %s failed: %s: %s", rollout.rollout_id, rollout.failure.stage, rollout.failure.message
                    )
            self._ending.add(lease.lease_id)
            await self._commit(lease, group)
        except asyncio.CancelledError:
            if lease.lease_id not in self._aborted:
                raise
            self.counters["groups_aborted"] += 1
            await self._buffer.release(lease, "aborted by the buffer", failed=False)
        except Exception as error:
            # A fault of one group must not take the others along.
            log.exception("group %s failed", lease.prompt.prompt_id)
            self._ending.add(lease.lease_id)
            self.counters["groups_broken"] += 1
            await self._buffer.release(lease, f"{type(error).__name__}: {error}", failed=True)
        self._runs.pop(lease.lease_id, None)
        self._aborted.discard(lease.lease_id)
        self._ending.discard(lease.lease_id)
        self._free.set()

    async def _commit(self, lease: buffer_pb2.PromptLease, group: pb.Group) -> None:
        try:
            answer = await self._buffer.commit(lease, group)
        except grpc.aio.AioRpcError as error:
            log.warning("group %s not committed: %s", group.group_id, describe(error))
            self.counters["groups_refused"] += 1
            if error.code() not in (grpc.StatusCode.ABORTED, grpc.StatusCode.NOT_FOUND):
                await self._buffer.release(lease, f"commit refused: {describe(error)}", failed=True)
            return
        self.counters["groups_committed"] += 1
        name = buffer_pb2.CommitOutcome.Name(answer.outcome).removeprefix("COMMIT_OUTCOME_").lower()
        self.counters[f"groups_{name}"] += 1
        if answer.reason:
            log.info("group %s: %s: %s", group.group_id, name, answer.reason)

    async def _renew_all(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_LONGEST_RENEWAL, max(_SHORTEST_RENEWAL, self._ttl / 3))):
                    await self._renew_now.wait()
            self._renew_now.clear()
            lease_ids = list(self._runs)
            if not lease_ids:
                continue
            try:
                answer = await self._buffer.renew(lease_ids)
            except grpc.aio.AioRpcError as error:
                # Leases may lapse meanwhile; their groups learn it when they are committed.
                log.warning("leases not renewed: %s", describe(error))
                continue
            if answer.ttl_seconds > 0:
                self._ttl = answer.ttl_seconds
            for lease_id, directive in zip(lease_ids, answer.directives, strict=False):
                if (
                    directive == buffer_pb2.LEASE_DIRECTIVE_ABORT
                    and lease_id in self._runs
                    and lease_id not in self._aborted | self._ending
                ):
                    self._aborted.add(lease_id)
                    self._runs[lease_id][1].cancel()

    async def _give_back(self, reason: str) -> None:
        runs = list(self._runs.values())
        for _, task in runs:
            task.cancel()
        await asyncio.gather(*(task for _, task in runs), return_exceptions=True)
        left = [(run.lease, run.partial()) for run, _ in runs if run.lease.lease_id in self._runs]
        left += [(lease, list(lease.partial)) for lease in self._unstarted]
        await asyncio.gather(
            *(
                self._buffer.release(lease, reason, failed=False, partial=partial, deadline=_STOP_SECONDS)
                for lease, partial in left
            )
        )
        self._runs.clear()
