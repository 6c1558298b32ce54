"""Repeated requests."""

import asyncio

import grpc
import pytest

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.errors import ContractError, StatusError
from vime_proto.idempotency import RequestLog


def _request(payload: str = "a") -> pb.CloseRunRequest:
    return pb.CloseRunRequest(request_id="id", run_id=payload)


class Work:
    """Counts its executions."""

    def __init__(self, error: Exception | None = None, seconds: float = 0.0):
        self.count, self.error, self.seconds = 0, error, seconds

    async def __call__(self):
        self.count += 1
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return pb.AckBatchResponse(trained=self.count)


async def test_the_same_request_gets_the_first_answer():
    log, work = RequestLog(), Work()
    answers = [await log.run("id", _request(), work) for _ in range(3)]
    assert work.count == 1 and answers == [pb.AckBatchResponse(trained=1)] * 3


async def test_concurrent_repetitions_share_one_execution():
    log, work = RequestLog(), Work(seconds=0.01)
    await asyncio.gather(*(log.run("id", _request(), work) for _ in range(20)))
    assert work.count == 1


async def test_another_payload_under_the_same_id_is_refused():
    log, work = RequestLog(), Work()
    await log.run("id", _request(), work)
    with pytest.raises(StatusError) as caught:
        await log.run("id", _request("b"), work)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT and work.count == 1


async def test_ids_of_different_calls_do_not_meet():
    log, work = RequestLog(), Work()
    await log.run("id", _request(), work)
    await log.run("id", pb.AckBatchRequest(request_id="id"), work)
    assert work.count == 2


async def test_failures_are_not_remembered():
    log = RequestLog()
    with pytest.raises(ContractError):
        await log.run("id", _request(), Work(ContractError("f", "d")))
    work = Work()
    assert (await log.run("id", _request(), work)).trained == 1


async def test_an_empty_id_is_refused():
    with pytest.raises(ContractError, match="request_id"):
        await RequestLog().run("", _request(), Work())


async def test_work_goes_on_when_its_caller_is_gone():
    log, work = RequestLog(), Work(seconds=0.05)
    first = asyncio.create_task(log.run("id", _request(), work))
    await asyncio.sleep(0.01)
    first.cancel()
    assert (await log.run("id", _request(), work)).trained == 1
    assert work.count == 1


async def test_answers_are_kept_for_a_stated_time_and_number():
    now = 0.0
    log, work = RequestLog(keep_seconds=10, capacity=3, clock=lambda: now), Work()
    await log.run("id", _request(), work)
    now = 9.0
    await log.run("id", _request(), work)
    assert work.count == 1
    now = 11.0
    await log.run("id", _request(), work)
    assert work.count == 2, "forgotten after its time"
    for other in range(5):
        await log.run(f"other-{other}", _request(), work)
    await log.run("id", _request(), work)
    assert work.count == 8, "forgotten for lack of room"
