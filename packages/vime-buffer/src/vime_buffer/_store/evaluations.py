"""Evaluations: their prompts, what came back, the result."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

import grpc
import sqlalchemy as sa

from vime_buffer._intake import FAILED_STATUSES, Intake, generated_tokens
from vime_buffer._new_prompt import NewPrompt
from vime_buffer._store import groups, leases, prompts
from vime_buffer._store.database import Transaction
from vime_buffer._store.runs import Run
from vime_buffer._store.schema import PromptState, Purpose, evaluation_results, evaluations
from vime_buffer._store.schema import leases as lease_rows
from vime_buffer._store.schema import prompts as prompt_rows
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.errors import StatusError
from vime_proto.sample.v1 import sample_pb2
from vime_proto.version import policy_version

DEFAULT_DEADLINE_SECONDS = 3600.0
_UNFINISHED = (PromptState.PENDING, PromptState.LEASED)
_INSERT = evaluation_results.insert()
_ONE_UNFINISHED = (
    sa.select(prompt_rows.c.seq)
    .where(
        prompt_rows.c.run_id == sa.bindparam("run"),
        prompt_rows.c.evaluation_id == sa.bindparam("evaluation"),
        prompt_rows.c.state.in_([int(state) for state in _UNFINISHED]),
    )
    .limit(1)
)


def start(
    tx: Transaction,
    run: Run,
    request: pb.StartEvaluationRequest,
    evaluation_id: str,
    questions: Sequence[sample_pb2.Prompt],
    sampling: sample_pb2.SamplingParams,
    k: int,
) -> pb.StartEvaluationResponse:
    """Queues the prompts of an evaluation before all others."""
    deadline = request.deadline_seconds if request.HasField("deadline_seconds") else DEFAULT_DEADLINE_SECONDS
    new = []
    for question in questions:
        own = sample_pb2.Prompt()
        own.CopyFrom(question)
        own.prompt_id = f"{evaluation_id}-{question.row}"
        own.group_size = k
        new.append(NewPrompt(own))
    prompts.insert(tx, run, new, Purpose.EVALUATE, evaluation_id)
    tx.execute(
        evaluations.insert(),
        {
            "run_id": run.run_id,
            "evaluation_id": evaluation_id,
            "set_name": request.set,
            "version": request.version.SerializeToString(),
            "sampling": sampling.SerializeToString(),
            "k": k,
            "prompts": len(new),
            "deadline_at": tx.now + deadline,
            "done": not new,
        },
    )
    tx.changed = True
    return pb.StartEvaluationResponse(evaluation_id=evaluation_id, prompts=len(new))


def open_evaluations(tx: Transaction, run_id: str) -> dict[str, sa.Row]:
    """Evaluations that are not done, by id."""
    rows = tx.execute(sa.select(evaluations).where(evaluations.c.run_id == run_id, evaluations.c.done.is_(False)))
    return {row.evaluation_id: row for row in rows}


def commit(tx: Transaction, context, intake: Intake, group: sample_pb2.Group) -> pb.CommitGroupResponse:
    """Takes the answers to one question in; failed rollouts count as they are."""
    run, lease = context.run, context.lease
    evaluation_id = context.evaluation_id
    leases.end_one(tx, lease.lease_id, "committed")
    groups.count_failures(tx, run.run_id, intake)
    _store(tx, run.run_id, evaluation_id, lease.target, [_summary(rollout) for rollout in group.rollouts])
    # The answers are summed up in the result's row; only training needs the tokens.
    prompts.answered(tx, run.run_id, lease.target)
    blob_ids = [payload.blob_id for payload in intake.payloads if payload.blob_id]
    groups.payloads.delete_unowned(tx, run.run_id, blob_ids)
    finish_if_complete(tx, run.run_id, evaluation_id)
    tx.changed = True
    return pb.CommitGroupResponse(outcome=pb.COMMIT_OUTCOME_EVALUATED)


def _evaluation_of(tx: Transaction, run_id: str, prompt_id: str) -> str:
    return tx.execute(
        sa.select(prompt_rows.c.evaluation_id).where(
            prompt_rows.c.run_id == run_id, prompt_rows.c.prompt_id == prompt_id
        )
    ).scalar_one()


def _store(tx: Transaction, run_id: str, evaluation_id: str, prompt_id: str, rollouts: list[dict]) -> None:
    tx.execute(
        _INSERT,
        {
            "run_id": run_id,
            "evaluation_id": evaluation_id,
            "prompt_id": prompt_id,
            "rollouts": json.dumps(rollouts),
        },
    )


def _summary(rollout: sample_pb2.Rollout) -> dict:
    failed = rollout.status in FAILED_STATUSES
    scored = rollout.HasField("reward") and not failed
    return {
        "failed": failed,
        "reward": rollout.reward if scored else None,
        "rewards": {} if failed else dict(rollout.rewards),
        "tokens": None if failed else generated_tokens(rollout),
        "truncated": rollout.status == sample_pb2.ROLLOUT_STATUS_TRUNCATED,
        "versions": [
            (segment.generation.version.run_id, segment.generation.version.lineage, segment.generation.version.number)
            for sample in rollout.samples
            for segment in sample.segments
            if segment.generation.HasField("version")
        ],
    }


def give_up(tx: Transaction, run_id: str, prompt_id: str) -> None:
    """Notes that a question ran out of attempts; its rollouts count as failed."""
    evaluation_id = _evaluation_of(tx, run_id, prompt_id)
    finish_if_complete(tx, run_id, evaluation_id)


def finish_if_complete(tx: Transaction, run_id: str, evaluation_id: str) -> None:
    """Closes an evaluation whose every question is answered or given up."""
    if tx.execute(_ONE_UNFINISHED, {"run": run_id, "evaluation": evaluation_id}).first() is None:
        _close(tx, run_id, evaluation_id)


def _close(tx: Transaction, run_id: str, evaluation_id: str) -> None:
    tx.execute(
        evaluations.update()
        .where(evaluations.c.run_id == run_id, evaluations.c.evaluation_id == evaluation_id)
        .values(done=True)
    )
    tx.changed = True


def close_overdue(tx: Transaction) -> None:
    """Closes evaluations past their deadline; what is still on loan for them is told to stop."""
    overdue = tx.execute(
        sa.select(evaluations.c.run_id, evaluations.c.evaluation_id).where(
            evaluations.c.done.is_(False), evaluations.c.deadline_at <= tx.now
        )
    ).all()
    for run_id, evaluation_id in overdue:
        abandon(tx, run_id, evaluation_id, "the evaluation's deadline passed")


def abandon(tx: Transaction, run_id: str, evaluation_id: str, why: str) -> None:
    """Ends an evaluation with the coverage that it reached."""
    mine = (
        prompt_rows.c.run_id == run_id,
        prompt_rows.c.evaluation_id == evaluation_id,
        prompt_rows.c.state.in_([int(state) for state in _UNFINISHED]),
    )
    tx.execute(
        lease_rows.update()
        .where(
            lease_rows.c.run_id == run_id,
            lease_rows.c.ended == "",
            lease_rows.c.target.in_(sa.select(prompt_rows.c.prompt_id).where(*mine)),
        )
        .values(ended="the evaluation is over")
    )
    # Dropped without a failure: the question was not asked often enough, it did not fail.
    tx.execute(prompt_rows.update().where(*mine).values(state=int(PromptState.DROPPED), failures=0, reason=why))
    _close(tx, run_id, evaluation_id)


def abandon_all(tx: Transaction, run_id: str, why: str) -> None:
    """Ends every open evaluation of a run."""
    for evaluation_id in open_evaluations(tx, run_id):
        abandon(tx, run_id, evaluation_id, why)


def next_deadline(tx: Transaction) -> float | None:
    """When the next evaluation is due; None when none is open."""
    return tx.execute(sa.select(sa.func.min(evaluations.c.deadline_at)).where(evaluations.c.done.is_(False))).scalar()


def is_open(tx: Transaction, run_id: str, evaluation_id: str) -> bool:
    """Whether there is such an evaluation and it is not done."""
    statement = sa.select(evaluations.c.done).where(
        evaluations.c.run_id == run_id, evaluations.c.evaluation_id == evaluation_id
    )
    return tx.execute(statement).scalar() is False


def result(tx: Transaction, run_id: str, evaluation_id: str) -> pb.GetEvaluationResultResponse:
    """The result so far; final when ``done``.

    Raises:
        StatusError: NOT_FOUND.
    """
    row = tx.execute(
        sa.select(evaluations).where(evaluations.c.run_id == run_id, evaluations.c.evaluation_id == evaluation_id)
    ).first()
    if row is None:
        raise StatusError(grpc.StatusCode.NOT_FOUND, f"no evaluation {evaluation_id!r} in run {run_id!r}")
    answered = [
        json.loads(text)
        for text in tx.execute(
            sa.select(evaluation_results.c.rollouts)
            .where(evaluation_results.c.run_id == run_id, evaluation_results.c.evaluation_id == evaluation_id)
            .order_by(evaluation_results.c.prompt_id)
        ).scalars()
    ]
    given_up = tx.execute(
        sa.select(sa.func.count()).where(
            prompt_rows.c.run_id == run_id,
            prompt_rows.c.evaluation_id == evaluation_id,
            prompt_rows.c.state == int(PromptState.DROPPED),
            prompt_rows.c.failures > 0,
        )
    ).scalar_one()
    return summarise(answered, bool(row.done), row.prompts, row.k, given_up)


def summarise(
    answered: list[list[dict]], done: bool, prompts_asked: int, k: int, given_up: int = 0
) -> pb.GetEvaluationResultResponse:
    """Means over rollouts. A failed rollout counts as reward 0, so that failing never looks better than being wrong.

    Args:
        answered: rollouts of each question that was committed.
        given_up: questions that ran out of attempts: all k rollouts of each count as failed.
    """
    rollouts = [rollout for question in answered for rollout in question]
    scored = [rollout["reward"] for rollout in rollouts if rollout["reward"] is not None]
    failed = sum(rollout["failed"] for rollout in rollouts) + given_up * k
    response = pb.GetEvaluationResultResponse(
        done=done,
        prompts=prompts_asked,
        completed_prompts=len(answered),
        rollouts=prompts_asked * k,
        scored_rollouts=len(scored),
        failed_rollouts=failed,
        k=k,
    )
    if len(scored) + failed:
        response.mean_reward = sum(scored) / (len(scored) + failed)
    if answered:
        passed = sum(any((rollout["reward"] or 0.0) >= 1.0 for rollout in question) for question in answered)
        response.pass_at_k = passed / len(answered)
    by_name: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout["rewards"].items():
            by_name[name].append(value)
    for name, values in by_name.items():
        response.mean_rewards[name] = sum(values) / (len(values) + failed)
    lengths = [rollout["tokens"] for rollout in rollouts if rollout["tokens"] is not None]
    if lengths:
        response.mean_response_tokens = sum(lengths) / len(lengths)
        response.truncated_share = sum(rollout["truncated"] for rollout in rollouts) / len(lengths)
    for version in sorted({tuple(version) for rollout in rollouts for version in rollout["versions"]}):
        response.versions.append(policy_version(*version))
    return response
