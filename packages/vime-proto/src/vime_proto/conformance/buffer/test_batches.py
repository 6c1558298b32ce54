"""Batch leases."""

from __future__ import annotations

import threading
import time

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.conformance._calls import ABORTED, INVALID, new_id, refused
from vime_proto.conformance.buffer.conftest import group_ids


def _fill(buffer, count: int, **settings) -> None:
    buffer.ready(*(f"p{i}" for i in range(8)), **settings)
    for lease in buffer.lease(count).leases:
        buffer.commit(lease)


def test_a_batch_waits_until_it_is_full(buffer):
    _fill(buffer, 1, batch_groups=2)
    assert buffer.batch().outcome == pb.LEASE_OUTCOME_EMPTY
    buffer.commit(buffer.lease_one())
    batch = buffer.granted_batch()
    assert len(batch.groups) == 2 and batch.lease_id and batch.batch_id and batch.ttl_seconds > 0
    assert batch.HasField("ordinal") and batch.ordinal == 0


def test_a_long_poll_returns_when_the_batch_is_full(buffer):
    _fill(buffer, 1, batch_groups=2)
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(buffer.batch(wait_seconds=10)))
    waiting.start()
    time.sleep(0.2)
    buffer.commit(buffer.lease_one())
    waiting.join(8)
    assert answers and answers[0].outcome == pb.LEASE_OUTCOME_GRANTED


def test_the_same_request_gets_the_same_batch(buffer):
    _fill(buffer, 2, max_staleness=1)
    request_id = new_id()
    first = buffer.batch(request_id=request_id)
    assert buffer.batch(request_id=request_id) == first
    assert buffer.stats().groups_batch_leased == 1


def test_an_ack_counts_once(buffer):
    _fill(buffer, 1)
    batch, request_id = buffer.granted_batch(), new_id()
    assert buffer.ack(batch, request_id=request_id) == 1
    assert buffer.ack(batch, request_id=request_id) == 1
    with refused(ABORTED):
        buffer.ack(batch)
    assert buffer.stats().batches_trained == 1


def test_a_nacked_batch_is_lent_again_as_it_was(buffer):
    _fill(buffer, 2, batch_groups=2)
    first = buffer.granted_batch()
    buffer.call("NackBatch", pb.NackBatchRequest, lease_id=first.lease_id, reason="test")
    again = buffer.granted_batch()
    assert (again.batch_id, again.ordinal, list(again.groups)) == (first.batch_id, first.ordinal, list(first.groups))
    with refused(ABORTED):
        buffer.ack(first)


def test_a_refused_sample_sends_its_prompt_back_and_keeps_the_others(buffer):
    _fill(buffer, 2, batch_groups=2)
    first = buffer.granted_batch()
    bad = first.groups[0]
    refused_samples = {bad.rollouts[0].samples[0].sample_id: "NaN log-prob"}
    buffer.call("NackBatch", pb.NackBatchRequest, lease_id=first.lease_id, refused_samples=refused_samples)
    assert buffer.batch().outcome == pb.LEASE_OUTCOME_EMPTY
    lease = buffer.lease_one()
    assert lease.prompt.prompt_id == bad.prompt_id and lease.attempt == 2
    buffer.commit(lease)
    assert set(group_ids(buffer.granted_batch())) == set(group_ids(first))


def test_refusing_a_sample_of_no_batch_is_named(buffer):
    _fill(buffer, 1)
    batch = buffer.granted_batch()
    with refused(INVALID, names="nobody"):
        buffer.call("NackBatch", pb.NackBatchRequest, lease_id=batch.lease_id, refused_samples={"nobody": "?"})
    assert buffer.ack(batch) == 1


def test_a_restarted_trainer_gets_its_batch_back_at_once(buffer):
    _fill(buffer, 2, batch_groups=2)
    first = buffer.granted_batch(incarnation="1")
    again = buffer.granted_batch(incarnation="2")
    assert again.batch_id == first.batch_id and list(again.groups) == list(first.groups)
    with refused(ABORTED):
        buffer.ack(first)
    assert buffer.ack(again) == 1


def test_batch_leases_are_renewed(buffer):
    _fill(buffer, 1)
    batch = buffer.granted_batch()
    assert buffer.renew(batch.lease_id) == [pb.LEASE_DIRECTIVE_CONTINUE]


def test_a_prompt_lease_acks_no_batch(buffer):
    buffer.ready("a")
    lease = buffer.lease_one()
    with refused(ABORTED, INVALID):
        buffer.call("AckBatch", pb.AckBatchRequest, lease_id=lease.lease_id)


def test_the_end_of_data_comes_after_the_last_ack(buffer):
    buffer.ready("a")
    buffer.commit(buffer.lease_one())
    batch = buffer.granted_batch()
    assert buffer.batch().outcome == pb.LEASE_OUTCOME_EMPTY, "the batch on loan may come back"
    buffer.ack(batch)
    buffer.publish(1)
    assert buffer.batch().outcome == pb.LEASE_OUTCOME_END_OF_DATA
