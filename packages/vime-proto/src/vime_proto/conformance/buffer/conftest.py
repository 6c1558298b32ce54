"""The client that the buffer's tests share."""

from __future__ import annotations

import pytest

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.buffer.v1 import buffer_pb2_grpc
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.conformance._calls import NOT_FOUND, new_id, refused
from vime_proto.fakes import build
from vime_proto.version import policy_version


class Client:
    """One run at the buffer under test. Every call takes a fresh request id unless told otherwise."""

    def __init__(self, target, run_id: str, evaluation_set: str):
        self.evaluation_set = evaluation_set
        self.stub = buffer_pb2_grpc.BufferServiceStub(target.channel)
        self.timeout = target.timeout
        self.run_id = run_id

    def call(self, method: str, request, **fields):
        """Calls with run id and request id filled in."""
        message = request(**fields)
        names = message.DESCRIPTOR.fields_by_name
        if "run_id" in names and not message.run_id:
            message.run_id = self.run_id
        if "request_id" in names and not message.request_id:
            message.request_id = new_id()
        return getattr(self.stub, method)(message, timeout=self.timeout)

    def open(self, **fields) -> pb.OpenRunResponse:
        settings = {
            "batch_groups": 1,
            "group_size": 2,
            "max_staleness": 0,
            "publish_interval": 1,
            "seed": 0,
            "epochs": 1,
            "lineage": common.Lineage(ordinal=0),
        }
        return self.call("OpenRun", pb.OpenRunRequest, **{**settings, **fields})

    def version(self, number: int, lineage: int = 0) -> common.PolicyVersion:
        return policy_version(self.run_id, lineage, number)

    def publish(self, number: int, lineage: int = 0) -> pb.PublishVersionResponse:
        return self.call("PublishVersion", pb.PublishVersionRequest, version=self.version(number, lineage))

    def put(self, *names: str) -> pb.PutPromptsResponse:
        return self.call("PutPrompts", pb.PutPromptsRequest, prompts=[build.prompt(name) for name in names])

    def ready(self, *names: str, **settings) -> None:
        """An open run at version 0 with these prompts."""
        self.open(**settings)
        self.put(*names)
        self.publish(0)

    def lease(
        self, most: int = 100, holder: str = "worker", incarnation: str = "1", **fields
    ) -> pb.LeasePromptsResponse:
        return self.call(
            "LeasePrompts", pb.LeasePromptsRequest, holder=holder, incarnation=incarnation, max_prompts=most, **fields
        )

    def lease_one(self, **fields) -> pb.PromptLease:
        answer = self.lease(1, **fields)
        assert answer.outcome == pb.LEASE_OUTCOME_GRANTED, pb.LeaseOutcome.Name(answer.outcome)
        assert len(answer.leases) == 1
        return answer.leases[0]

    def commit(
        self, lease: pb.PromptLease, group=None, number: int = 0, lineage: int = 0, **fields
    ) -> pb.CommitGroupResponse:
        given = group if group is not None else build.group(lease, self.version(number, lineage))
        settings = {"lease_id": lease.lease_id, "attempt": lease.attempt, "group": given}
        return self.call("CommitGroup", pb.CommitGroupRequest, **{**settings, **fields})

    def release(self, lease: pb.PromptLease, **fields) -> pb.ReleaseLeaseResponse:
        return self.call("ReleaseLease", pb.ReleaseLeaseRequest, lease_id=lease.lease_id, reason="test", **fields)

    def batch(self, holder: str = "trainer", incarnation: str = "1", **fields) -> pb.LeaseBatchResponse:
        return self.call("LeaseBatch", pb.LeaseBatchRequest, holder=holder, incarnation=incarnation, **fields)

    def granted_batch(self, **fields) -> pb.LeaseBatchResponse:
        answer = self.batch(**fields)
        assert answer.outcome == pb.LEASE_OUTCOME_GRANTED, pb.LeaseOutcome.Name(answer.outcome)
        return answer

    def ack(self, batch: pb.LeaseBatchResponse, **fields) -> int:
        return self.call("AckBatch", pb.AckBatchRequest, lease_id=batch.lease_id, **fields).trained

    def train(self, number: int, lineage: int = 0) -> pb.LeaseBatchResponse:
        """One whole step from prompt to publication: answers one prompt per group of the batch with `number`."""
        batch = self.batch()
        while batch.outcome == pb.LEASE_OUTCOME_EMPTY:
            self.commit(self.lease_one(), number=number, lineage=lineage)
            batch = self.batch()
        assert batch.outcome == pb.LEASE_OUTCOME_GRANTED, pb.LeaseOutcome.Name(batch.outcome)
        self.publish(self.ack(batch), lineage)
        return batch

    def check_no_prompts_left(self) -> None:
        """The training data is used up: END_OF_DATA comes once no evaluation can follow, at CloseRun at the latest."""
        if self.lease().outcome == pb.LEASE_OUTCOME_END_OF_DATA:
            with refused(NOT_FOUND, names=self.evaluation_set):
                self.call(
                    "StartEvaluation",
                    pb.StartEvaluationRequest,
                    set=self.evaluation_set,
                    version=self.version(self.stats().version.number),
                )
        else:
            assert self.lease().outcome == pb.LEASE_OUTCOME_EMPTY
        self.call("CloseRun", pb.CloseRunRequest, reason="finished")
        assert self.lease().outcome == pb.LEASE_OUTCOME_END_OF_DATA

    def renew(self, *lease_ids: str) -> list[int]:
        return list(self.call("RenewLeases", pb.RenewLeasesRequest, lease_ids=lease_ids).directives)

    def rewind(self, batch: int, ordinal: int = 1, parent: int = 0) -> pb.RewindResponse:
        lineage = common.Lineage(ordinal=ordinal, parent=parent, forked_at=batch)
        return self.call("Rewind", pb.RewindRequest, batch=batch, lineage=lineage)

    def fetch(self, *samples: pb.SampleSelection | str, **fields) -> list[pb.FetchSamplesResponse]:
        chosen = [pb.SampleSelection(sample_id=one) if isinstance(one, str) else one for one in samples]
        return list(self.call("FetchSamples", pb.FetchSamplesRequest, samples=chosen, **fields))

    def stats(self) -> pb.GetStatsResponse:
        return self.call("GetStats", pb.GetStatsRequest)


@pytest.fixture
def buffer(target, run_id, request) -> Client:
    """A client with a run of its own, not opened yet."""
    return Client(target, run_id, request.config.getoption("--evaluation-set"))


def group_ids(batch: pb.LeaseBatchResponse) -> list[str]:
    """Ids of a batch's groups, in order."""
    return [group.group_id for group in batch.groups]
