"""Callers who leave while something is lent to them."""

import asyncio
import contextlib
import threading

import pytest
from client import ids, prompts_of

from vime_buffer._service.changes import Changes
from vime_buffer.settings import PromptFile
from vime_proto.buffer.v1 import buffer_pb2 as pb


@contextlib.contextmanager
def _busy_writer(core):
    """Holds the writer, so that what is asked for inside waits in its queue."""
    gate = threading.Event()
    core.database._jobs.put((lambda tx: gate.wait(90), lambda result, error: None))
    try:
        yield
    finally:
        gate.set()


async def _until(condition):
    """Waits for something that announces itself to nobody."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _leave(core, call):
    """Cancels a call whose look waits for the writer; answers when the server noticed."""
    await _until(lambda: core._unfinished)
    before = len(core._unfinished)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await _until(lambda: len(core._unfinished) > before)


async def test_prompts_granted_to_a_caller_who_left_are_lent_again_at_once(client):
    core = client.server.core
    await client.open(batch_groups=2, group_size=1)
    await client.put("a", "b")
    with _busy_writer(core):
        await _leave(core, asyncio.create_task(client.lease(wait=30)))
    answer = await client.lease(wait=5, holder="other")
    assert prompts_of(answer) == ["a", "b"]
    stats = await client.stats()
    assert (stats.prompts_leased, stats.leases_lapsed_total, stats.capacity) == (2, 0, 0)


async def test_who_asks_again_under_the_same_id_keeps_the_grant(client):
    core = client.server.core
    await client.open(batch_groups=1, group_size=1)
    await client.put("a")
    with _busy_writer(core):
        lost = asyncio.create_task(client.lease(wait=30, request_id="same"))
        await _until(lambda: core._unfinished)
        again = asyncio.create_task(client.lease(wait=30, request_id="same"))
        await _until(lambda: len(core._unfinished) == 2)
        await _leave(core, lost)
    (lease,) = (await again).leases
    assert await client.renew(lease) == [pb.LEASE_DIRECTIVE_CONTINUE]
    assert (await client.commit(lease)).outcome == pb.COMMIT_OUTCOME_READY


async def test_who_asks_again_after_the_grant_was_undone_gets_another(client):
    core = client.server.core
    await client.open(batch_groups=1, group_size=1)
    await client.put("a")
    with _busy_writer(core):
        await _leave(core, asyncio.create_task(client.lease(wait=30, request_id="same")))
    await core.settle()
    (lease,) = (await client.lease(request_id="same")).leases
    assert (await client.commit(lease)).outcome == pb.COMMIT_OUTCOME_READY


async def test_a_batch_granted_to_a_trainer_who_left_is_lent_again_at_once(client):
    core = client.server.core
    await client.open(batch_groups=1, group_size=1)
    await client.put("a")
    await client.commit((await client.lease()).leases[0])
    with _busy_writer(core):
        await _leave(core, asyncio.create_task(client.batch(wait=30)))
    batch = await client.batch(wait=5)
    assert (ids(batch), batch.ordinal) == (["a"], 0)
    await client.ack(batch)


async def test_a_caller_who_leaves_while_rows_are_read_breaks_nobody_elses_call(start, jsonl):
    path = jsonl("x.jsonl", [{"prompt": f"q{i}"} for i in range(4)])
    async with start(prompts=[PromptFile(path=path)]) as client:
        core = client.server.core
        await client.open(batch_groups=4, group_size=1, epochs=1)
        read, reads, gate, writer = core.source.read, [], threading.Event(), threading.Event()

        def held(*arguments):
            reads.append(arguments)
            if len(reads) == 1:
                gate.wait(90)
                # What this read leads to waits in the queue of the writer.
                core.database._jobs.put((lambda tx: writer.wait(90), lambda result, error: None))
            return read(*arguments)

        core.source.read = held
        lost = asyncio.create_task(client.lease(most=2, wait=25))
        await _until(lambda: reads)
        other = asyncio.create_task(client.lease(most=2, wait=25, holder="other"))
        await _until(lambda: core.reading["run"]._waiters)
        gate.set()
        await _until(lambda: core.database._jobs.qsize())
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        # Time enough for the other call to read the same rows, if it were let in before they are stored.
        await asyncio.sleep(0.2)
        writer.set()
        assert prompts_of(await other) == ["x-0-0", "x-0-1"]
        assert prompts_of(await client.lease(wait=5, holder="third")) == ["x-0-2", "x-0-3"]
        assert (await client.stats()).prompts_read_total == 4


async def test_a_server_that_stops_takes_back_what_nobody_heard_of(start):
    async with start() as client:
        core = client.server.core
        await client.open(batch_groups=1, group_size=1)
        await client.put("a")
        with _busy_writer(core):
            await _leave(core, asyncio.create_task(client.lease(wait=30)))
    async with start() as client:
        assert prompts_of(await client.lease(holder="other")) == ["a"]


async def test_a_cancellation_is_not_lost_when_something_changes_at_the_same_time():
    changes = Changes()
    task = asyncio.create_task(changes.wait(0, 10))
    await asyncio.sleep(0)
    changes.notify()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
