"""Prompt leases: granted once, renewed, fenced, lapsed, given back."""

from __future__ import annotations

import threading
import time

import pytest

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.conformance._calls import ABORTED, INVALID, new_id, refused
from vime_proto.fakes import build
from vime_proto.sample.v1 import sample_pb2


def test_a_lease_states_what_a_worker_needs(buffer):
    buffer.ready("a", group_size=3)
    lease = buffer.lease_one()
    assert lease.lease_id and lease.attempt == 1 and lease.group_size == 3
    assert lease.ttl_seconds > 0
    assert lease.purpose == pb.LEASE_PURPOSE_TRAIN and not lease.evaluation_id
    assert lease.minimum_version == buffer.version(0)


def test_a_prompt_states_its_own_group_size(buffer):
    buffer.open(group_size=2)
    buffer.call("PutPrompts", pb.PutPromptsRequest, prompts=[build.prompt("a", group_size=5)])
    buffer.publish(0)
    assert buffer.lease_one().group_size == 5


def test_a_prompt_is_lent_once(buffer):
    buffer.ready("a", "b", batch_groups=2)
    assert len(buffer.lease(holder="one").leases) == 2
    assert buffer.lease(holder="two").outcome == pb.LEASE_OUTCOME_EMPTY


def test_prompts_are_lent_in_their_order(buffer):
    names = [f"p{i}" for i in range(6)]
    buffer.ready(*names, batch_groups=6)
    got = [lease.prompt.prompt_id for _ in range(3) for lease in buffer.lease(2).leases]
    assert got == names


@pytest.mark.parametrize("field", ["holder", "incarnation"])
def test_a_lease_needs_a_holder(buffer, field):
    buffer.ready("a")
    with refused(INVALID, field=field):
        buffer.lease(**{field: ""})


def test_asking_for_no_prompts_is_refused(buffer):
    buffer.ready("a")
    with refused(INVALID, field="max_prompts"):
        buffer.lease(0)


def test_the_same_request_gets_the_same_leases(buffer):
    buffer.ready("a", "b", batch_groups=2)
    request_id = new_id()
    first = buffer.lease(1, request_id=request_id)
    assert buffer.lease(1, request_id=request_id) == first
    assert buffer.lease(2).leases[0].prompt.prompt_id == "b", "the repetition must not have taken a second prompt"


def test_the_same_request_with_another_payload_is_refused(buffer):
    buffer.ready("a", "b", batch_groups=2)
    request_id = new_id()
    buffer.lease(1, request_id=request_id)
    with refused(INVALID, names=request_id):
        buffer.lease(2, request_id=request_id)


def test_concurrent_repetitions_share_one_execution(buffer):
    buffer.ready(*(f"p{i}" for i in range(8)), batch_groups=8)
    request_id, answers = new_id(), []
    threads = [
        threading.Thread(target=lambda: answers.append(buffer.lease(1, request_id=request_id))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8 and all(answer == answers[0] for answer in answers)
    assert buffer.stats().prompts_leased == 1


def test_a_renewed_lease_goes_on_and_an_unknown_one_stops(buffer):
    buffer.ready("a")
    lease = buffer.lease_one()
    assert buffer.renew(lease.lease_id, "unknown") == [pb.LEASE_DIRECTIVE_CONTINUE, pb.LEASE_DIRECTIVE_ABORT]


def test_a_new_incarnation_fences_the_old_one_at_once(buffer):
    buffer.ready("a")
    old = buffer.lease_one(incarnation="1")
    new = buffer.lease_one(incarnation="2")
    assert new.prompt == old.prompt and new.attempt == 2
    assert buffer.renew(old.lease_id) == [pb.LEASE_DIRECTIVE_ABORT]
    with refused(ABORTED):
        buffer.commit(old)
    assert buffer.commit(new).outcome == pb.COMMIT_OUTCOME_READY


def test_another_holder_fences_nobody(buffer):
    buffer.ready("a", "b", batch_groups=2)
    mine = buffer.lease_one(holder="one")
    buffer.lease_one(holder="two", incarnation="2")
    assert buffer.renew(mine.lease_id) == [pb.LEASE_DIRECTIVE_CONTINUE]


def test_a_lease_given_back_is_lent_again(buffer):
    buffer.ready("a")
    first = buffer.lease_one()
    buffer.release(first)
    again = buffer.lease_one()
    assert again.prompt == first.prompt and again.attempt == 2 and again.lease_id != first.lease_id
    with refused(ABORTED):
        buffer.commit(first)


def test_a_prompt_given_back_keeps_its_place(buffer):
    buffer.ready("a", "b", batch_groups=2)
    first = buffer.lease_one()
    buffer.release(first)
    assert buffer.lease_one().prompt.prompt_id == "a"


def test_a_clean_release_does_not_count_as_an_attempt(buffer):
    buffer.ready("a", max_attempts=2)
    for _ in range(5):
        buffer.release(buffer.lease_one())
    assert buffer.stats().prompts_dropped_total == 0


def test_capacity_survives_failing_producers(buffer):
    buffer.ready("a", batch_groups=2, max_attempts=1000)
    before = buffer.stats().capacity
    for _ in range(20):
        buffer.release(buffer.lease_one(), failed=True)
    assert buffer.stats().capacity == before == 2


def test_failed_attempts_drop_the_prompt_in_the_end(buffer):
    buffer.ready("a", max_attempts=3)
    for attempt in (1, 2, 3):
        lease = buffer.lease_one()
        assert lease.attempt == attempt
        buffer.release(lease, failed=True)
    buffer.check_no_prompts_left()
    assert buffer.stats().prompts_dropped_total == 1


def test_partial_rollouts_wait_for_the_next_attempt(buffer):
    buffer.ready("a")
    lease = buffer.lease_one()
    partial = build.group(lease, buffer.version(0)).rollouts[0]
    partial.status = sample_pb2.ROLLOUT_STATUS_ABORTED
    partial.ClearField("reward")
    buffer.release(lease, partial=[partial])
    again = buffer.lease_one()
    assert list(again.partial) == [partial]
    assert again.prompt == lease.prompt, "the prompt itself stays as it was"


def test_without_partial_rollouts_the_next_attempt_is_pristine(buffer):
    buffer.ready("a")
    lease = buffer.lease_one()
    buffer.release(lease)
    again = buffer.lease_one()
    assert not again.partial and again.prompt == lease.prompt


def test_a_long_poll_returns_when_a_prompt_comes(buffer):
    buffer.ready("a")
    lease, answers = buffer.lease_one(), []
    waiting = threading.Thread(target=lambda: answers.append(buffer.lease(holder="two", wait_seconds=10)))
    waiting.start()
    time.sleep(0.2)
    began = time.monotonic()
    buffer.release(lease)
    waiting.join()
    assert time.monotonic() - began < 5
    assert answers[0].outcome == pb.LEASE_OUTCOME_GRANTED


def test_a_long_poll_ends_empty_in_time(buffer):
    buffer.ready("a")
    buffer.lease_one()
    began = time.monotonic()
    assert buffer.lease(wait_seconds=0.3).outcome == pb.LEASE_OUTCOME_EMPTY
    assert 0.2 < time.monotonic() - began < 5


def test_a_lease_that_is_not_renewed_lapses(buffer, request):
    buffer.ready("a")
    lease = buffer.lease_one()
    longest = request.config.getoption("--longest-lease")
    if lease.ttl_seconds > longest:
        pytest.skip(f"leases of the target hold {lease.ttl_seconds:g} s, more than --longest-lease {longest:g}")
    answer = buffer.lease(holder="two", wait_seconds=lease.ttl_seconds + 5)
    assert answer.outcome == pb.LEASE_OUTCOME_GRANTED
    assert answer.leases[0].prompt == lease.prompt and answer.leases[0].attempt == 2
    assert buffer.renew(lease.lease_id) == [pb.LEASE_DIRECTIVE_ABORT]
    with refused(ABORTED):
        buffer.commit(lease)
    assert buffer.stats().leases_lapsed_total == 1


def test_renewal_keeps_a_lease(buffer, request):
    buffer.ready("a")
    lease = buffer.lease_one()
    if lease.ttl_seconds > request.config.getoption("--longest-lease"):
        pytest.skip(f"leases of the target hold {lease.ttl_seconds:g} s")
    end = time.monotonic() + 1.5 * lease.ttl_seconds
    while time.monotonic() < end:
        assert buffer.renew(lease.lease_id) == [pb.LEASE_DIRECTIVE_CONTINUE]
        time.sleep(lease.ttl_seconds / 4)
    assert buffer.commit(lease).outcome == pb.COMMIT_OUTCOME_READY
