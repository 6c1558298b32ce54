"""Lending prompts: evaluations first, then training as far as the gate allows."""

from __future__ import annotations

import dataclasses

import sqlalchemy as sa

from vime_buffer._rules import capacity, minimum_number
from vime_buffer._store import evaluations, leases, prompts
from vime_buffer._store.database import Transaction
from vime_buffer._store.runs import Run
from vime_buffer._store.schema import LeaseKind, PromptState, Purpose
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.common.v1 import common_pb2
from vime_proto.sample.v1 import sample_pb2
from vime_proto.version import policy_version


@dataclasses.dataclass(frozen=True)
class Grant:
    """What a call found.

    Attributes:
        response: the leases, or that there are none.
        shortage: prompts that the gate would have let through, had the queue held them.
    """

    response: pb.LeasePromptsResponse
    shortage: int


def lease_prompts(tx: Transaction, run: Run, holder: str, incarnation: str, most: int, ttl: float) -> Grant:
    """Lends up to ``most`` prompts."""
    if run.closed:
        return Grant(pb.LeasePromptsResponse(outcome=pb.LEASE_OUTCOME_END_OF_DATA), 0)
    lender = _Lender(tx, run, holder, incarnation, ttl)
    lender.evaluate(most)
    shortage = lender.train(most - len(lender.leases))
    outcome = pb.LEASE_OUTCOME_GRANTED if lender.leases else pb.LEASE_OUTCOME_EMPTY
    return Grant(pb.LeasePromptsResponse(outcome=outcome, leases=lender.leases), shortage)


class _Lender:
    def __init__(self, tx: Transaction, run: Run, holder: str, incarnation: str, ttl: float):
        self._tx, self._run, self._ttl = tx, run, ttl
        self._holder, self._incarnation = holder, incarnation
        self.leases: list[pb.PromptLease] = []

    def evaluate(self, most: int) -> None:
        rows = prompts.queued(self._tx, self._run.run_id, Purpose.EVALUATE, most)
        if not rows:
            return
        open_ones = evaluations.open_evaluations(self._tx, self._run.run_id)
        known = [row for row in rows if row.evaluation_id in open_ones]
        for lease, row in self._lend(known, Purpose.EVALUATE):
            lease.evaluation_id = row.evaluation_id
            lease.minimum_version.CopyFrom(common_pb2.PolicyVersion.FromString(open_ones[row.evaluation_id].version))
            lease.sampling.CopyFrom(sample_pb2.SamplingParams.FromString(open_ones[row.evaluation_id].sampling))

    def train(self, most: int) -> int:
        run = self._run
        occupied = prompts.occupancy(self._tx, run.run_id)
        wanted = min(most, capacity(run.limits, run.trained, run.version, occupied))
        if wanted <= 0:
            return 0
        rows = prompts.queued(self._tx, run.run_id, Purpose.TRAIN, wanted)
        for place, (lease, row) in enumerate(self._lend(rows, Purpose.TRAIN)):
            number = minimum_number(run.limits, run.trained, occupied.total + place)
            lease.minimum_version.CopyFrom(policy_version(run.run_id, run.lineage, number))
            if row.partial:
                lease.partial.extend(_usable(pb.PromptLease.FromString(row.partial), run, number))
        return wanted - len(rows)

    def _lend(self, rows, purpose: Purpose):
        targets = [(row.prompt_id, purpose, row.attempts + 1) for row in rows]
        ids = leases.grant(self._tx, self._run, LeaseKind.PROMPT, self._holder, self._incarnation, targets, self._ttl)
        for lease_id, row in zip(ids, rows, strict=True):
            lease = pb.PromptLease(
                lease_id=lease_id, attempt=row.attempts + 1, ttl_seconds=self._ttl, purpose=_PURPOSE[purpose]
            )
            lease.prompt.MergeFromString(row.payload)
            lease.group_size = lease.prompt.group_size or self._run.group_size
            self.leases.append(lease)
            yield lease, row
        prompts.lend(self._tx, self._run.run_id, [row.prompt_id for row in rows])


_PURPOSE = {Purpose.TRAIN: pb.LEASE_PURPOSE_TRAIN, Purpose.EVALUATE: pb.LEASE_PURPOSE_EVALUATE}


def _usable(kept: pb.PromptLease, run: Run, minimum: int) -> list[sample_pb2.Rollout]:
    """Partial rollouts whose every token may still be trained on under this lease."""
    versions = lambda rollout: [  # noqa: E731
        segment.generation.version
        for sample in rollout.samples
        for segment in sample.segments
        if segment.generation.HasField("version")
    ]
    return [
        rollout
        for rollout in kept.partial
        if all(version.lineage == run.lineage and version.number >= minimum for version in versions(rollout))
    ]


def train_data_seen(tx: Transaction, run_id: str) -> bool:
    """Whether the run ever had a prompt to train on."""
    rows = prompts.prompts
    statement = sa.select(rows.c.seq).where(rows.c.run_id == run_id, rows.c.purpose == int(Purpose.TRAIN)).limit(1)
    return tx.execute(statement).first() is not None


def train_data_left(tx: Transaction, run_id: str) -> bool:
    """Whether prompts in the store may still become groups."""
    states = (PromptState.UNFORMATTED, PromptState.PENDING, PromptState.LEASED)
    return prompts.count(tx, run_id, Purpose.TRAIN, *states) > 0


def groups_left(tx: Transaction, run_id: str) -> bool:
    """Whether groups in the store may still be trained on."""
    return prompts.count(tx, run_id, Purpose.TRAIN, PromptState.READY, PromptState.BATCHED) > 0
