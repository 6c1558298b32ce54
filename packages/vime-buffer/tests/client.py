"""A buffer's caller for tests: short names for the RPCs, and one object per role."""

from __future__ import annotations

import builders as b

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.buffer.v1.buffer_pb2_grpc import BufferServiceStub
from vime_proto.channel import open_channel
from vime_proto.version import policy_version


class Client:
    def __init__(self, address: str, run: str = b.RUN):
        self.run = run
        self.channel = open_channel(address)
        self.stub = BufferServiceStub(self.channel)

    @classmethod
    async def connect(cls, address: str) -> Client:
        """A client that is connected: its calls are tried once, so none may fail for want of a connection."""
        client = cls(address)
        await client.channel.channel_ready()
        return client

    async def close(self):
        await self.channel.close()

    async def open(self, batch_groups=2, group_size=2, max_staleness=0, lineage=None, publish=True, **options):
        options.setdefault("publish_interval", 1)
        answer = await self.stub.OpenRun(
            pb.OpenRunRequest(
                request_id=b.rid(),
                run_id=self.run,
                batch_groups=batch_groups,
                group_size=group_size,
                max_staleness=max_staleness,
                lineage=lineage or b.lineage(0),
                **options,
            )
        )
        if publish:
            await self.publish(answer.trained, answer.lineage.ordinal)
        return answer

    async def publish(self, number, lineage=0):
        return await self.stub.PublishVersion(
            pb.PublishVersionRequest(request_id=b.rid(), version=policy_version(self.run, lineage, number))
        )

    async def put(self, *names, **fields):
        return await self.stub.PutPrompts(
            pb.PutPromptsRequest(
                request_id=b.rid(), run_id=self.run, prompts=[b.prompt(name, **fields) for name in names]
            )
        )

    async def lease(self, most=100, wait=0.0, holder="worker", incarnation="1", request_id=None):
        return await self.stub.LeasePrompts(
            pb.LeasePromptsRequest(
                request_id=request_id or b.rid(),
                run_id=self.run,
                holder=holder,
                incarnation=incarnation,
                max_prompts=most,
                wait_seconds=wait,
            )
        )

    def commit_request(self, lease, group=None, **options):
        return pb.CommitGroupRequest(
            request_id=b.rid(),
            run_id=self.run,
            lease_id=lease.lease_id,
            attempt=lease.attempt,
            group=group or b.group(lease, **options),
        )

    async def commit(self, lease, group=None, **options):
        return await self.stub.CommitGroup(self.commit_request(lease, group, **options))

    async def release(self, lease, failed=False, partial=()):
        return await self.stub.ReleaseLease(
            pb.ReleaseLeaseRequest(
                request_id=b.rid(), run_id=self.run, lease_id=lease.lease_id, failed=failed, partial=partial
            )
        )

    async def renew(self, *leases):
        answer = await self.stub.RenewLeases(
            pb.RenewLeasesRequest(run_id=self.run, lease_ids=[one.lease_id for one in leases])
        )
        return list(answer.directives)

    async def batch(self, wait=0.0, holder="trainer", incarnation="1"):
        return await self.stub.LeaseBatch(
            pb.LeaseBatchRequest(
                request_id=b.rid(), run_id=self.run, holder=holder, incarnation=incarnation, wait_seconds=wait
            )
        )

    async def ack(self, batch):
        return await self.stub.AckBatch(
            pb.AckBatchRequest(request_id=b.rid(), run_id=self.run, lease_id=batch.lease_id)
        )

    async def nack(self, batch, **refused):
        return await self.stub.NackBatch(
            pb.NackBatchRequest(request_id=b.rid(), run_id=self.run, lease_id=batch.lease_id, refused_samples=refused)
        )

    async def rewind(self, batch, ordinal=1, parent=0):
        return await self.stub.Rewind(
            pb.RewindRequest(
                request_id=b.rid(), run_id=self.run, batch=batch, lineage=b.lineage(ordinal, parent, batch)
            )
        )

    async def checkpoint(self, batch, oldest):
        return await self.stub.ReportCheckpoint(
            pb.ReportCheckpointRequest(request_id=b.rid(), run_id=self.run, batch=batch, oldest_restorable=oldest)
        )

    async def close_run(self, reason="finished"):
        return await self.stub.CloseRun(pb.CloseRunRequest(request_id=b.rid(), run_id=self.run, reason=reason))

    async def stats(self):
        return await self.stub.GetStats(pb.GetStatsRequest(run_id=self.run))

    async def fetch(self, *ids, fields=(), rows=(), layers=None):
        request = pb.FetchSamplesRequest(
            run_id=self.run,
            samples=[pb.SampleSelection(sample_id=one, routing_rows=rows) for one in ids],
            fields=fields,
            routing_layers=layers,
        )
        return [answer async for answer in self.stub.FetchSamples(request)]

    async def step(self, number, lineage=0, most=100, **options):
        """Answers what is granted, trains one batch, publishes the next version."""
        for lease in (await self.lease(most)).leases:
            await self.commit(lease, **options)
        batch = await self.batch()
        if batch.outcome == pb.LEASE_OUTCOME_GRANTED:
            await self.ack(batch)
            await self.publish(number, lineage)
        return batch


def ids(batch) -> list[str]:
    return [group.group_id for group in batch.groups]


def prompts_of(response) -> list[str]:
    return [lease.prompt.prompt_id for lease in response.leases]
