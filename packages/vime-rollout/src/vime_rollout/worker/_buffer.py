"""The worker's side of BufferService."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence

import grpc
import grpc.aio

from vime_proto.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from vime_proto.channel import call
from vime_proto.checksum import checksum
from vime_proto.errors import describe
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_rollout.worker._errors import FatalError

log = logging.getLogger(__name__)
_BLOB_PART = 4 << 20
_RETRY_SECONDS = 0.5


class BufferClient:
    """Leases prompts, keeps leases, hands groups in.

    Args:
        channel: to the buffer.
        run_id: the run.
        holder: this worker's name; with each start it has another incarnation, which frees what an earlier start held.
        connect_seconds: how long the buffer, or the run, may be missing.
        inline_routing_bytes: larger routes of a group are sent as blobs.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        run_id: str,
        holder: str,
        connect_seconds: float = 600.0,
        inline_routing_bytes: int = 64 << 20,
    ):
        self._stub = buffer_pb2_grpc.BufferServiceStub(channel)
        self._run_id, self._holder = run_id, holder
        self._connect_seconds = connect_seconds
        self._inline_routing_bytes = inline_routing_bytes
        self.incarnation = uuid.uuid4().hex

    async def lease(self, count: int, wait_seconds: float) -> buffer_pb2.LeasePromptsResponse:
        """Leases up to ``count`` prompts, waiting for the first one.

        Raises:
            FatalError: the buffer cannot be reached, does not know the run, or refuses the call.
        """
        request = buffer_pb2.LeasePromptsRequest(
            request_id=uuid.uuid4().hex,
            run_id=self._run_id,
            holder=self._holder,
            incarnation=self.incarnation,
            max_prompts=count,
            wait_seconds=wait_seconds,
        )
        end, warned = time.monotonic() + self._connect_seconds, False
        while True:
            try:
                return await call(
                    self._stub.LeasePrompts, request, timeout=wait_seconds + 30.0, deadline=self._connect_seconds
                )
            except grpc.aio.AioRpcError as error:
                # The trainer opens the run; workers may be there first.
                waits = error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
                if not waits or time.monotonic() + _RETRY_SECONDS >= end:
                    raise FatalError(f"cannot lease prompts: {describe(error)}") from error
                if not warned:
                    log.info("waiting for the run to be opened: %s", describe(error))
                    warned = True
                await asyncio.sleep(_RETRY_SECONDS)

    async def renew(self, lease_ids: Sequence[str]) -> buffer_pb2.RenewLeasesResponse:
        """Renews leases, in one call."""
        request = buffer_pb2.RenewLeasesRequest(run_id=self._run_id, lease_ids=lease_ids)
        return await call(self._stub.RenewLeases, request, timeout=10.0)

    async def commit(self, lease: buffer_pb2.PromptLease, group: pb.Group) -> buffer_pb2.CommitGroupResponse:
        """Hands a group in; repeated while the buffer is unreachable, under one id.

        Raises:
            grpc.aio.AioRpcError: ABORTED when the lease is gone, INVALID_ARGUMENT when the group is refused.
        """
        await self._move_routing(lease, group)
        request = buffer_pb2.CommitGroupRequest(
            request_id=f"{lease.lease_id}:{self.incarnation}:commit",
            run_id=self._run_id,
            lease_id=lease.lease_id,
            attempt=lease.attempt,
            group=group,
        )
        return await call(self._stub.CommitGroup, request, timeout=60.0, deadline=self._connect_seconds)

    async def release(
        self,
        lease: buffer_pb2.PromptLease,
        reason: str,
        *,
        failed: bool,
        partial: Sequence[pb.Rollout] = (),
        deadline: float = 10.0,
    ) -> None:
        """Gives a lease back; one that is gone already is no error."""
        request = buffer_pb2.ReleaseLeaseRequest(
            request_id=f"{lease.lease_id}:{self.incarnation}:release",
            run_id=self._run_id,
            lease_id=lease.lease_id,
            reason=reason,
            failed=failed,
            partial=partial,
        )
        try:
            await call(self._stub.ReleaseLease, request, timeout=deadline)
        except grpc.aio.AioRpcError as error:
            log.info("lease %s not released: %s", lease.lease_id, describe(error))

    async def _move_routing(self, lease: buffer_pb2.PromptLease, group: pb.Group) -> None:
        samples = [sample for rollout in group.rollouts for sample in rollout.samples if sample.HasField("routing")]
        if sum(len(sample.routing.inline) for sample in samples) <= self._inline_routing_bytes:
            return
        for sample in samples:
            if sample.routing.WhichOneof("payload") == "inline":
                data = sample.routing.inline
                key = f"{lease.lease_id}:{self.incarnation}:{sample.sample_id}:routing"
                response = await call(self._put_blob, (key, data), timeout=120.0, deadline=self._connect_seconds)
                sample.routing.blob_id = response.blob_id

    async def _put_blob(self, blob: tuple[str, bytes], timeout: float, metadata=None):
        key, data = blob
        count = max(1, -(-len(data) // _BLOB_PART))

        async def parts():
            for number in range(count):
                part = buffer_pb2.PutBlobRequest(data=data[number * _BLOB_PART : (number + 1) * _BLOB_PART])
                if number == 0:
                    part.run_id, part.request_id = self._run_id, key
                if number == count - 1:
                    part.checksum.CopyFrom(checksum(data))
                yield part

        return await self._stub.PutBlob(parts(), timeout=timeout, metadata=metadata)
