"""Prompts: the queue, the states, and what is under way."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import sqlalchemy as sa

from vime_buffer._new_prompt import NewPrompt
from vime_buffer._rules import Occupancy, after_failed_attempt
from vime_buffer._store import counters
from vime_buffer._store.database import Transaction, chunks
from vime_buffer._store.runs import Run, update
from vime_buffer._store.schema import PromptState, Purpose, prompts
from vime_proto.sample.v1 import sample_pb2

_OCCUPANCY = (
    sa.select(prompts.c.state, sa.func.count())
    .where(
        prompts.c.run_id == sa.bindparam("run"),
        prompts.c.purpose == Purpose.TRAIN,
        prompts.c.state.in_((PromptState.LEASED, PromptState.READY, PromptState.BATCHED)),
    )
    .group_by(prompts.c.state)
)
_QUEUE = (
    sa.select(prompts.c.prompt_id, prompts.c.payload, prompts.c.attempts, prompts.c.partial, prompts.c.evaluation_id)
    .where(
        prompts.c.run_id == sa.bindparam("run"),
        prompts.c.purpose == sa.bindparam("for_what"),
        prompts.c.state == PromptState.PENDING,
    )
    .order_by(prompts.c.seq)
    .limit(sa.bindparam("most"))
)

_SETTLE = (
    prompts.update()
    .where(prompts.c.run_id == sa.bindparam("run"), prompts.c.prompt_id == sa.bindparam("prompt"))
    .values(state=sa.bindparam("to"), partial=None)
)
_ANSWERED = (
    prompts.update()
    .where(prompts.c.run_id == sa.bindparam("run"), prompts.c.prompt_id == sa.bindparam("prompt"))
    .values(state=int(PromptState.EVALUATED), partial=None, payload=None)
)


def digest(prompt: sample_pb2.Prompt) -> bytes:
    """Digest of a prompt's content."""
    return hashlib.blake2b(prompt.SerializeToString(deterministic=True), digest_size=16).digest()


def occupancy(tx: Transaction, run_id: str) -> Occupancy:
    """Groups under way."""
    counts = {state: count for state, count in tx.execute(_OCCUPANCY, {"run": run_id})}
    return Occupancy(
        leased=counts.get(PromptState.LEASED, 0),
        ready=counts.get(PromptState.READY, 0),
        batched=counts.get(PromptState.BATCHED, 0),
    )


def queued(tx: Transaction, run_id: str, purpose: Purpose, most: int):
    """The first prompts that wait, in their original order."""
    return tx.execute(_QUEUE, {"run": run_id, "for_what": int(purpose), "most": most}).all()


def count(tx: Transaction, run_id: str, purpose: Purpose, *states: PromptState) -> int:
    """Prompts in these states."""
    statement = sa.select(sa.func.count()).where(
        prompts.c.run_id == run_id, prompts.c.purpose == int(purpose), prompts.c.state.in_(states)
    )
    return tx.execute(statement).scalar_one()


def insert(
    tx: Transaction, run: Run, new: Sequence[NewPrompt], purpose: Purpose = Purpose.TRAIN, evaluation_id: str = ""
) -> None:
    """Adds prompts at the end of the queue; a format hook that raises counts as the first failure."""
    if not new:
        return
    rows = []
    for offset, one in enumerate(new):
        failures, dropped = (0, False) if one.formatted else after_failed_attempt(0, run.max_attempts)
        state = PromptState.PENDING if one.formatted else PromptState.UNFORMATTED
        if dropped:
            state = PromptState.DROPPED
            counters.add(tx, run.run_id, counters.DROPPED)
        rows.append(
            {
                "run_id": run.run_id,
                "prompt_id": one.prompt.prompt_id,
                "seq": run.next_seq + offset,
                "purpose": int(purpose),
                "state": int(state),
                "evaluation_id": evaluation_id,
                "group_size": one.prompt.group_size,
                "payload": one.prompt.SerializeToString(),
                "digest": digest(one.prompt),
                "reason": one.reason,
                "failures": failures,
            }
        )
    tx.execute(prompts.insert(), rows)
    update(tx, run.run_id, next_seq=run.next_seq + len(rows))
    tx.changed = True


def unformatted(tx: Transaction, run_id: str, most: int) -> list[sample_pb2.Prompt]:
    """Prompts whose row the format hook could not turn into a prompt yet."""
    statement = (
        sa.select(prompts.c.payload)
        .where(
            prompts.c.run_id == run_id,
            prompts.c.purpose == int(Purpose.TRAIN),
            prompts.c.state == PromptState.UNFORMATTED,
        )
        .order_by(prompts.c.seq)
        .limit(most)
    )
    return [sample_pb2.Prompt.FromString(payload) for payload in tx.execute(statement).scalars()]


def reformat(tx: Transaction, run: Run, one: NewPrompt) -> None:
    """Takes a second attempt of the format hook in."""
    key = (prompts.c.run_id == run.run_id, prompts.c.prompt_id == one.prompt.prompt_id)
    state = tx.execute(sa.select(prompts.c.state).where(*key)).scalar()
    if state != PromptState.UNFORMATTED:
        return
    if one.formatted:
        tx.execute(
            prompts.update()
            .where(*key)
            .values(
                state=int(PromptState.PENDING),
                group_size=one.prompt.group_size,
                payload=one.prompt.SerializeToString(),
                digest=digest(one.prompt),
            )
        )
        tx.changed = True
    else:
        fail(tx, run, one.prompt.prompt_id, one.reason, retry_state=PromptState.UNFORMATTED)


def set_state(tx: Transaction, run_id: str, prompt_ids: Sequence[str], state: PromptState, **values) -> None:
    """Moves prompts to a state."""
    for part in chunks(prompt_ids):
        tx.execute(
            prompts.update()
            .where(prompts.c.run_id == run_id, prompts.c.prompt_id.in_(part))
            .values(state=int(state), **values)
        )


def settle(tx: Transaction, run_id: str, prompt_id: str, state: PromptState) -> None:
    """Moves one prompt on after its commit and forgets its partial rollouts; what every commit does, hence prepared."""
    tx.execute(_SETTLE, {"run": run_id, "prompt": prompt_id, "to": int(state)})


def answered(tx: Transaction, run_id: str, prompt_id: str) -> None:
    """Ends a question of an evaluation; its content is needed no more."""
    tx.execute(_ANSWERED, {"run": run_id, "prompt": prompt_id})


def requeue(tx: Transaction, run_id: str, prompt_ids: Sequence[str]) -> None:
    """Puts prompts back at their place in the queue, without counting a failure."""
    set_state(tx, run_id, prompt_ids, PromptState.PENDING)
    tx.changed = tx.changed or bool(prompt_ids)


def fail(
    tx: Transaction, run: Run, prompt_id: str, reason: str, retry_state: PromptState = PromptState.PENDING, **values
) -> bool:
    """Counts a failed attempt and puts the prompt back, or drops it; answers whether it was dropped."""
    key = (prompts.c.run_id == run.run_id, prompts.c.prompt_id == prompt_id)
    row = tx.execute(sa.select(prompts.c.failures, prompts.c.purpose).where(*key)).one()
    failures, dropped = after_failed_attempt(row.failures, run.max_attempts)
    state = PromptState.DROPPED if dropped else retry_state
    tx.execute(prompts.update().where(*key).values(state=int(state), failures=failures, reason=reason, **values))
    if dropped and row.purpose == Purpose.TRAIN:
        counters.add(tx, run.run_id, counters.DROPPED)
    tx.changed = True
    return dropped


def lend(tx: Transaction, run_id: str, prompt_ids: Sequence[str]) -> None:
    """Marks prompts as leased and counts the attempt."""
    set_state(tx, run_id, prompt_ids, PromptState.LEASED, attempts=prompts.c.attempts + 1)


def put(tx: Transaction, run: Run, given: Sequence[sample_pb2.Prompt]) -> tuple[list[NewPrompt], list[str]]:
    """Sorts prompts into new ones and refused ones.

    Returns:
        The new prompts, and a message per given prompt: empty when it was taken, or is there already with this content.
    """
    ids = [prompt.prompt_id for prompt in given]
    known: dict[str, bytes] = {}
    for part in chunks(ids):
        statement = sa.select(prompts.c.prompt_id, prompts.c.digest).where(
            prompts.c.run_id == run.run_id, prompts.c.prompt_id.in_(part)
        )
        known |= {prompt_id: value for prompt_id, value in tx.execute(statement)}
    new: list[NewPrompt] = []
    messages: list[str] = []
    for prompt in given:
        mine = digest(prompt)
        first = known.setdefault(prompt.prompt_id, mine)
        if first is mine:
            new.append(NewPrompt(prompt))
        differs = first != mine
        messages.append(f"prompt_id {prompt.prompt_id!r} exists with another content" if differs else "")
    return new, messages
