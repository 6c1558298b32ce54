"""State lives in rows: it survives SIGKILL, restarts and two processes that want the same file."""

import asyncio
import subprocess
import sys

import builders as b
import grpc
import pytest
from client import Client, ids, prompts_of

from vime_buffer import BufferServer, BufferSettings, DatabaseInUseError
from vime_proto.buffer.v1 import buffer_pb2 as pb


async def test_everything_survives_a_kill(process, refused):
    first = process("--inline-bytes", "0")
    client = await Client.connect(first.address)
    await client.open(batch_groups=2, group_size=1, max_staleness=1)
    await client.put(*"abcdef")
    batch = await client.step(1)
    held = (await client.lease()).leases
    commit = client.commit_request(held[0])
    answer = await client.stub.CommitGroup(commit)
    before = await client.stats()
    await client.close()
    first.kill()

    client = await Client.connect(process("--inline-bytes", "0").address)
    assert await client.stats() == before
    # A repeated commit is answered as before; a lease of before the kill is still good.
    assert await client.stub.CommitGroup(commit) == answer
    assert await client.renew(*held) == [pb.LEASE_DIRECTIVE_ABORT] + [pb.LEASE_DIRECTIVE_CONTINUE] * (len(held) - 1)
    for lease in held[1:]:
        await client.commit(lease)
    second = await client.batch()
    assert ids(second) == ["c", "d"] and second.ordinal == 1
    sample = batch.groups[0].rollouts[0].samples[0].sample_id
    (fetched,) = await client.fetch(sample)
    assert fetched.sample.sample_id == sample
    assert (await client.ack(second)).trained == 2
    await client.close()


async def test_an_acked_batch_stays_acked_when_the_answer_was_lost(process):
    first = process()
    client = await Client.connect(first.address)
    await client.open(batch_groups=1, group_size=1)
    await client.put("a", "b")
    await client.commit((await client.lease()).leases[0])
    batch = await client.batch()
    request = pb.AckBatchRequest(request_id="ack", run_id=b.RUN, lease_id=batch.lease_id)
    assert (await client.stub.AckBatch(request)).trained == 1
    await client.close()
    first.kill()
    client = await Client.connect(process().address)
    assert (await client.stub.AckBatch(request)).trained == 1
    assert (await client.stats()).batches_trained == 1
    await client.close()


async def test_repeated_kills_in_the_middle_of_commits_lose_and_double_nothing(process):
    """Kills the buffer while groups come in, again and again; every prompt is trained once."""
    names = [f"p{i}" for i in range(12)]
    trained = []
    current = process()
    client = await Client.connect(current.address)
    await client.open(batch_groups=3, group_size=1, max_staleness=1)
    await client.put(*names)
    for round_number in range(4):
        leases = (await client.lease(incarnation=str(round_number))).leases
        commits = [asyncio.ensure_future(client.commit(lease)) for lease in leases]
        await asyncio.sleep(0.002 * round_number)
        current.kill()
        results = await asyncio.gather(*commits, return_exceptions=True)
        assert all(isinstance(one, (pb.CommitGroupResponse, grpc.RpcError)) for one in results)
        await client.close()
        current = process()
        client = await Client.connect(current.address)
        stats = await client.stats()
        assert stats.groups_committed_total >= sum(isinstance(one, pb.CommitGroupResponse) for one in results)
        batch = await client.batch(incarnation=str(round_number))
        if batch.outcome == pb.LEASE_OUTCOME_GRANTED:
            trained += ids(batch)
            await client.publish((await client.ack(batch)).trained)
    while True:
        for lease in (await client.lease(incarnation="last")).leases:
            await client.commit(lease)
        batch = await client.batch(incarnation="last")
        if batch.outcome != pb.LEASE_OUTCOME_GRANTED:
            break
        trained += ids(batch)
        await client.publish((await client.ack(batch)).trained)
    assert sorted(trained) == sorted(names)
    await client.close()


async def test_time_during_which_the_buffer_was_down_lapses_no_lease(start, clock):
    async with start() as client:
        await client.open(batch_groups=1, group_size=1)
        await client.put("a")
        lease = (await client.lease()).leases[0]
    clock.now += 1000
    async with start() as client:
        assert await client.renew(lease) == [pb.LEASE_DIRECTIVE_CONTINUE]
        clock.now += 61
        assert await client.renew(lease) == [pb.LEASE_DIRECTIVE_ABORT]


async def test_files_that_no_row_names_are_deleted_at_the_start(start, tmp_path):
    async with start(inline_bytes=0) as client:
        await client.open(batch_groups=1, group_size=1)
        await client.put("a")
        await client.commit((await client.lease()).leases[0])
    root = tmp_path / "buffer.db.blobs"
    kept = [path for path in root.rglob("*") if path.is_file()]
    (own,) = root.iterdir()
    for name in (f"{own.name}/aa/{'a' * 32}", f"{own.name}/aa/{'b' * 32}.partial"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"x")
    async with start(inline_bytes=0) as client:
        assert [path for path in root.rglob("*") if path.is_file()] == kept
        assert ids(await client.batch()) == ["a"]


async def test_blobs_that_no_commit_names_are_deleted_in_time(start, clock):
    from vime_buffer._service.housekeeping import _forget
    from vime_proto.checksum import checksum

    async with start(blob_keep_seconds=100) as client:
        await client.open()
        part = pb.PutBlobRequest(run_id=b.RUN, request_id="r", data=b"abc", checksum=checksum(b"abc"))
        await client.stub.PutBlob(iter([part]))
        core = client.server.core
        await core.database.run(lambda tx: _forget(tx, core))
        assert (await client.stats()).payload_bytes == 3
        clock.now += 101
        await core.database.run(lambda tx: _forget(tx, core))
        assert (await client.stats()).payload_bytes == 0
        assert core.files._fs.find(core.files._root) == [core.files.claim]


async def test_two_buffers_on_one_database_are_refused(start, tmp_path):
    async with start() as client:
        with pytest.raises(DatabaseInUseError, match=r"buffer\.db is in use"):
            await BufferServer.start(BufferSettings(database=str(tmp_path / "buffer.db")))
        answer = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "vime_buffer", "serve", "--database", str(tmp_path / "buffer.db")],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert answer.returncode == 1 and "in use by another vime-buffer process" in answer.stderr
        await client.open()


async def test_a_database_of_another_schema_is_refused(start, tmp_path):
    import sqlite3

    from vime_proto.errors import ContractError

    async with start():
        pass
    connection = sqlite3.connect(tmp_path / "buffer.db")
    connection.execute("update schema_info set version = 99")
    connection.commit()
    connection.close()
    with pytest.raises(ContractError, match="schema 99"):
        async with start():
            pass


async def test_prompts_read_before_a_restart_are_not_read_again(start, jsonl):
    from vime_buffer.settings import PromptFile

    prompts = [PromptFile(path=jsonl("x.jsonl", [{"prompt": f"q{i}"} for i in range(6)]))]
    seen = []
    for incarnation in "123":
        async with start(prompts=prompts) as client:
            answer = await client.open(batch_groups=2, group_size=1, epochs=1, seed=1, publish=False)
            await client.publish(answer.trained)
            leases = await client.lease(incarnation=incarnation)
            seen.append(prompts_of(leases))
            for lease in leases.leases:
                await client.commit(lease)
            await client.ack(await client.batch(incarnation=incarnation))
    assert len(sum(seen, [])) == len(set(sum(seen, []))) == 6


async def test_files_of_others_below_the_blob_root_are_left_alone(start, tmp_path):
    root = tmp_path / "blobs"
    (root / "ab").mkdir(parents=True)
    others = [root / "train.jsonl", root / "ab" / "notes.txt", root / ("c" * 32)]
    for path in others:
        path.write_bytes(b"x")
    async with start(blobs=str(root)):
        assert all(path.exists() for path in others)


async def test_two_databases_may_share_a_blob_root(start, tmp_path):
    root = tmp_path / "shared"

    def files():
        return sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".json")

    for name in ("one", "two"):
        async with start(database=str(tmp_path / f"{name}.db"), blobs=str(root), inline_bytes=0) as client:
            await client.open(batch_groups=1, group_size=1)
            await client.put("a")
            await client.commit((await client.lease()).leases[0])
    kept = files()
    assert len({path.parent.parent for path in kept}) == 2
    # Each start sweeps what no row names: of its own files alone.
    for name in ("one", "two"):
        async with start(database=str(tmp_path / f"{name}.db"), blobs=str(root), inline_bytes=0) as client:
            assert files() == kept
            lease = await client.batch()
            sample = lease.groups[0].rollouts[0].samples[0]
            assert (await client.fetch(sample.sample_id))[0].sample.segments
            await client.ack(lease)


async def test_a_failed_commit_is_reported_and_the_writer_goes_on(start, monkeypatch):
    from sqlalchemy.exc import OperationalError

    async with start() as client:
        database = client.server.core.database
        good = database._round

        def full(jobs, apart):
            raise OperationalError("commit", {}, OSError("disk full"))

        monkeypatch.setattr(database, "_round", full)
        with pytest.raises(OperationalError, match="disk full"):
            await database.run(lambda tx: None)
        monkeypatch.setattr(database, "_round", good)
        with pytest.raises(KeyError, match="mine"):
            await database.run(lambda tx: {}["mine"])
        assert await database.run(lambda tx: 5) == 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_nobody_waits_for_a_writer_that_has_ended(start, monkeypatch):
    async with start() as client:
        database = client.server.core.database

        def broken(jobs, apart):
            raise AssertionError("a fault of ours")

        monkeypatch.setattr(database, "_round", broken)
        for _ in range(2):
            async with asyncio.timeout(30):
                with pytest.raises((RuntimeError, AssertionError), match="ended|fault of ours"):
                    await database.run(lambda tx: None)


async def test_a_clock_that_was_set_back_does_not_lengthen_leases(start, clock):
    async with start() as client:
        await client.open(batch_groups=1, group_size=1)
        await client.put("a")
        await client.lease()
    clock.now -= 7200
    async with start() as client:
        clock.now += 59
        assert (await client.lease(holder="other")).outcome == pb.LEASE_OUTCOME_EMPTY
        clock.now += 2
        assert prompts_of(await client.lease(holder="other")) == ["a"]
