"""Rows of the in-memory buffer."""

from __future__ import annotations

import dataclasses
import enum

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.sample.v1 import sample_pb2
from vime_proto.version import LineageTree


class State(enum.Enum):
    """Of a prompt."""

    PENDING = "pending"
    LEASED = "leased"
    READY = "ready"
    BATCHED = "batched"
    TRAINED = "trained"
    FILTERED = "filtered"
    DROPPED = "dropped"
    EVALUATED = "evaluated"


@dataclasses.dataclass
class PromptRow:
    """A prompt, its group once committed, and its place in the queue (order of insertion)."""

    prompt: sample_pb2.Prompt
    evaluation_id: str = ""
    state: State = State.PENDING
    attempts: int = 0
    failures: int = 0
    partial: list[sample_pb2.Rollout] = dataclasses.field(default_factory=list)
    group: sample_pb2.Group | None = None
    committed_attempt: int = 0
    ready: int = 0


@dataclasses.dataclass
class LeaseRow:
    """A lease of a prompt or of a batch."""

    lease_id: str
    target: str
    batch: bool
    holder: str
    incarnation: str
    expires: float
    granted_at: int
    attempt: int = 0


@dataclasses.dataclass
class BatchRow:
    """A formed batch; `ordinal` once acked."""

    batch_id: str
    group_ids: list[str]
    leased: bool = False
    ordinal: int | None = None


@dataclasses.dataclass
class EvaluationRow:
    """An evaluation and its prompts."""

    request: pb.StartEvaluationRequest
    prompt_ids: list[str]
    rollouts: int
    deadline: float
    done: bool = False


@dataclasses.dataclass
class RunRow:
    """Everything of a run."""

    opened: pb.OpenRunRequest
    tree: LineageTree
    trained: int = 0
    version: common.PolicyVersion | None = None
    rewind_due: bool = False
    closed: bool = False
    position: int = 0
    ready_counter: int = 0
    batch_counter: int = 0
    collected: int = 0
    prompts: dict[str, PromptRow] = dataclasses.field(default_factory=dict)
    leases: dict[str, LeaseRow] = dataclasses.field(default_factory=dict)
    batches: list[BatchRow] = dataclasses.field(default_factory=list)
    evaluations: dict[str, EvaluationRow] = dataclasses.field(default_factory=dict)
    incarnations: dict[tuple[bool, str], str] = dataclasses.field(default_factory=dict)
    retired: set[tuple[bool, str, str]] = dataclasses.field(default_factory=set)
    stats: pb.GetStatsResponse = dataclasses.field(default_factory=pb.GetStatsResponse)

    @property
    def run_id(self) -> str:
        return self.opened.run_id

    @property
    def max_attempts(self) -> int:
        return self.opened.max_attempts if self.opened.HasField("max_attempts") else 3

    def training(self, *states: State) -> list[PromptRow]:
        """Prompts for training in these states, in their original order."""
        return [row for row in self.prompts.values() if not row.evaluation_id and row.state in states]

    def occupied(self) -> int:
        """Groups under way: leased, ready, or in a batch that is not acked."""
        return len(self.training(State.LEASED, State.READY, State.BATCHED))

    def capacity(self) -> int:
        """Groups that may be granted now; 0 before the first publication of the lineage."""
        if self.version is None or self.closed:
            return 0
        batches = self.opened.max_staleness + 1 - (self.trained - self.version.number)
        return max(0, batches * self.opened.batch_groups - self.occupied())
