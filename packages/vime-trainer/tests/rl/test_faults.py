"""Lost answers, kills, refusals: nothing is lost and nothing is trained twice."""

import json
import signal
import threading
import time

import grpc
import pytest
from stages import Stages, code_of, prompts, settings_for
from test_loop import lines, run, steps
from toy import ToyBackend

from vime_proto.errors import ContractError, StatusError, describe
from vime_proto.fakes import FakeBuffer, FakeEngine
from vime_trainer.checkpoint import CheckpointError, list_steps
from vime_trainer.publish import PublishError
from vime_trainer.rl import Interrupted, train
from vime_trainer.rl import _run as run_module
from vime_trainer.rl._buffer import LostLeaseError
from vime_trainer.rl._io import IoThread
from vime_trainer.rl._lineage import LineageRecord, open_lineage

TRAINER_CALLS = ["OpenRun", "LeaseBatch", "AckBatch", "PublishVersion", "ReportCheckpoint", "CloseRun", "Rewind"]


class FaultyBuffer(FakeBuffer):
    """Executes a call, then loses its answer: once for each entry of `lose`."""

    def __init__(self, lose=(), **options):
        super().__init__(**options)
        self.lose = list(lose)
        self.spoil = 0

    async def _lossy(self, name, request, context):
        answer = await getattr(FakeBuffer, name)(self, request, context)
        if name in self.lose:
            self.lose.remove(name)
            raise StatusError(grpc.StatusCode.UNAVAILABLE, f"the answer to {name} was lost")
        return answer

    async def FetchSamples(self, request, context):
        count = 0
        async for answer in super().FetchSamples(request, context):
            if "FetchSamples" in self.lose and count == 2:
                self.lose.remove("FetchSamples")
                raise StatusError(grpc.StatusCode.UNAVAILABLE, "the stream broke")
            if self.spoil:
                self.spoil -= 1
                generation = answer.sample.segments[1].generation
                generation.logprobs.data = b"\x00\x00\xc0\x7f" + generation.logprobs.data[4:]
            count += 1
            yield answer


def _add(name):
    async def method(self, request, context):
        return await self._lossy(name, request, context)

    setattr(FaultyBuffer, name, method)


for _name in TRAINER_CALLS:
    _add(_name)


def faulty(rows=24, **options):
    return FaultyBuffer(source=prompts(rows), evaluations={"held_out": prompts(2, 500)}, **options)


def all_prompts(backend):
    return sorted(code for step in backend.trained for code in step)


def test_lost_answers_train_nothing_twice(tmp_path):
    lose = [*TRAINER_CALLS[:-1], "AckBatch", "LeaseBatch", "FetchSamples", "PublishVersion"]
    buffer = faulty(rows=12, lose=lose)
    with Stages(buffer) as stages:
        reason, backend = run(settings_for(stages, tmp_path, max_steps=None, batch={"epochs": 1}))
        assert reason == "finished" and buffer.lose == []
        assert len(backend.trained) == 3
        assert all_prompts(backend) == sorted(code_of(i) for i in range(12))
        assert [row["step"] for row in steps(tmp_path)] == [1, 2, 3]


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs but what a kill cannot prevent."""


class KillingIo(IoThread):
    """Dies right before, or right after, the n-th thing that the training thread asks of the outside."""

    remaining = 10**9
    after = False

    def run(self, work):
        KillingIo.remaining -= 1
        if KillingIo.remaining < 0:
            work.close()
            raise Killed
        if KillingIo.remaining == 0 and not KillingIo.after:
            work.close()
            raise Killed
        result = super().run(work)
        if KillingIo.remaining == 0:
            raise Killed
        return result


def count_calls(tmp_path) -> int:
    KillingIo.remaining, KillingIo.after = 10**9, False
    with Stages(rows=8) as stages:
        run(settings_for(stages, tmp_path, max_steps=None, batch={"epochs": 1}))
    return 10**9 - KillingIo.remaining


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("interval", [1, 2])
def test_a_kill_anywhere_loses_nothing_and_trains_nothing_twice(after, interval, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "IoThread", KillingIo)
    calls = count_calls(tmp_path / "count")
    assert calls > 15
    for n in range(1, calls + 1, 3 if interval == 1 else 5):
        output = tmp_path / f"{n}"
        with Stages(rows=8) as stages:
            settings = settings_for(
                stages, output, max_steps=None, batch={"epochs": 1}, checkpoint={"interval": interval}
            )
            KillingIo.remaining, KillingIo.after = n, after
            try:
                run(settings)
            except Killed:
                pass
            else:
                # Long polls differ by a call or two between runs.
                assert n > calls - 4
                continue
            KillingIo.remaining = 10**9
            before = time.monotonic()
            reason, backend = run(settings)
            assert reason == "finished"
            # No waiting for the dead process's lease (60 s).
            assert time.monotonic() - before < 45
            # What the kept history trained is every prompt, once.
            assert all_prompts(backend) == sorted(code_of(i) for i in range(8)), (n, backend.trained)


def test_killed_twice_between_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "IoThread", KillingIo)
    KillingIo.after = False
    with Stages(rows=12) as stages:
        settings = settings_for(stages, tmp_path, max_steps=None, batch={"epochs": 1}, checkpoint={"interval": 2})
        for n in (30, 9, 8):
            KillingIo.remaining = n
            with pytest.raises(Killed):
                run(settings)
        KillingIo.remaining = 10**9
        _, backend = run(settings)
        assert all_prompts(backend) == sorted(code_of(i) for i in range(12))
        lineages = json.loads((tmp_path / "lineages.json").read_text())["lineages"]
        assert [one["ordinal"] for one in lineages] == [0, 1, 2, 3]


def test_resumed_runs_evaluate_before_they_train(tmp_path):
    evaluation = {"set": "held_out", "at_end": False}
    with Stages(rows=40) as stages:
        run(settings_for(stages, tmp_path, max_steps=3, evaluations=[evaluation]))
        run(settings_for(stages, tmp_path, max_steps=5, evaluations=[evaluation]))
        rows = [line for line in lines(tmp_path) if "eval/held_out/reward_mean" in line]
        assert [row["step"] for row in rows] == [0, 3]


def test_resuming_equals_not_having_stopped(tmp_path):
    with Stages(rows=40) as stages:
        _, whole = run(settings_for(stages, tmp_path / "whole", max_steps=1))
    with Stages(rows=40) as stages:
        settings = settings_for(stages, tmp_path / "split", max_steps=1)
        run(settings)
        backend = ToyBackend()
        state = backend.restore(tmp_path / "split" / "checkpoints" / "step-00000001")
        assert state.step == 1 and state.version == {"run_id": "run", "lineage": 0, "number": 1}
        assert len(backend.trained) == len(whole.trained) == 1


# Refusals ------------------------------------------------------------------------------------------------------------


def test_a_target_that_is_reached_already_is_refused(tmp_path):
    with Stages() as stages:
        run(settings_for(stages, tmp_path, max_steps=3))
        for target in (2, 3):
            with pytest.raises(CheckpointError, match="has trained 3 steps already"):
                run(settings_for(stages, tmp_path, max_steps=target))


def test_resume_rules(tmp_path):
    with Stages() as stages:
        with pytest.raises(CheckpointError, match=r"must, but .* holds no complete checkpoint"):
            run(settings_for(stages, tmp_path, checkpoint={"resume": "must"}))
        run(settings_for(stages, tmp_path, max_steps=1))
        with pytest.raises(CheckpointError, match="never"):
            run(settings_for(stages, tmp_path, checkpoint={"resume": "never"}))
        with pytest.raises(CheckpointError, match=r"batch\.group_size: 3, but .* was written with 2"):
            run(settings_for(stages, tmp_path, batch={"group_size": 3}))
        with pytest.raises(CheckpointError, match=r"run_id: 'other', but .* was written with 'run'"):
            run(settings_for(stages, tmp_path, run_id="other"))


def test_lineages_are_written_down_once_and_for_all(tmp_path):
    assert open_lineage(tmp_path, "run", None) == LineageRecord(0)
    assert open_lineage(tmp_path, "run", None) == LineageRecord(1, 0, 0)  # started again, nothing to restore
    assert open_lineage(tmp_path, "run", (0, 4)) == LineageRecord(2, 0, 4)
    assert open_lineage(tmp_path, "run", (2, 7)) == LineageRecord(3, 2, 7)
    with pytest.raises(ValueError, match="holds run 'run', not 'other'"):
        open_lineage(tmp_path, "other", None)
    (tmp_path / "lineages.json").write_text("{}")
    with pytest.raises(ValueError, match="not a list of lineages"):
        open_lineage(tmp_path, "run", None)


def test_a_run_that_the_output_folder_does_not_know_is_refused(tmp_path):
    with Stages() as stages:
        run(settings_for(stages, tmp_path / "a", max_steps=1))
        with pytest.raises(ContractError, match="the buffer has a run of this id with 1 trained batches"):
            run(settings_for(stages, tmp_path / "b", max_steps=1))


def test_a_sample_with_a_nan_is_refused_by_name_and_the_run_goes_on(tmp_path, caplog):
    buffer = faulty(rows=8)
    buffer.spoil = 1
    with Stages(buffer) as stages:
        reason, backend = run(settings_for(stages, tmp_path, max_steps=None, batch={"epochs": 1}))
        assert reason == "finished"
        assert all_prompts(backend) == sorted(code_of(i) for i in range(8))
        assert "must be finite; position 0" in caplog.text and "/s'" in caplog.text


def test_refused_samples_without_end_fail_the_run(tmp_path):
    buffer = faulty(rows=40)
    buffer.spoil = 10**6
    with Stages(buffer) as stages:
        with pytest.raises(ContractError, match="3 batches in a row were refused"):
            run(settings_for(stages, tmp_path, batch={"max_refused": 3, "max_attempts": 10}))
        assert buffer.store.runs["run"].trained == 0


def test_a_lost_batch_lease_ends_the_run(tmp_path):
    class Fencing(FakeBuffer):
        async def AckBatch(self, request, context):
            raise StatusError(grpc.StatusCode.ABORTED, f"lease_id {request.lease_id!r} is not held any more")

    with Stages(Fencing(source=prompts(8))) as stages:
        with pytest.raises(LostLeaseError, match=r"batch 'run/batch-0': ABORTED: .* not held any more"):
            run(settings_for(stages, tmp_path))
        # The step's figures are there all the same.
        assert [row["step"] for row in steps(tmp_path)] == [1]


def test_the_batch_lease_is_renewed_while_training_takes_long(tmp_path):
    class Slow(ToyBackend):
        def step(self):
            time.sleep(4.0)
            return super().step()

    with Stages(FakeBuffer(source=prompts(8), lease_ttl_seconds=3.0)) as stages:
        assert train(settings_for(stages, tmp_path, max_steps=1), Slow) == "finished"


def test_weights_that_no_engine_takes_are_neither_acked_nor_published(tmp_path):
    class Refusing(FakeEngine):
        updates = 0

        async def LoadChunks(self, request, context):
            if request.update_id.startswith("run-0-2-"):
                raise StatusError(grpc.StatusCode.INTERNAL, "out of memory")
            return await super().LoadChunks(request, context)

    with Stages(engines=[Refusing("engine-0")]) as stages:
        with pytest.raises(
            PublishError, match=r"version run/0:2: 0 of 1 engines .*engine engine-0: INTERNAL: out of mem"
        ):
            run(settings_for(stages, tmp_path))
        row = stages.buffer.store.runs["run"]
        assert row.trained == 1 and row.version.number == 1 and not row.closed
        assert list_steps(tmp_path / "checkpoints") == [1]
        assert [row["step"] for row in steps(tmp_path)] == [1, 2]
        # The next process goes on from the checkpoint.
        reason, backend = run(settings_for(stages, tmp_path))
        assert reason == "finished" and len(backend.trained) == 3


@pytest.mark.parametrize(("contract", "refused"), [(("1.0", "1.10"), False), (("2.0", "2.1"), True)])
async def test_a_stage_that_speaks_another_contract_is_refused(contract, refused):
    from vime_proto.server import ServerInfo, ServerOptions, start_server
    from vime_trainer.rl._peers import check_peer

    server = await start_server(
        [], ServerInfo("their-buffer", "buffer", "3", "run", contract=contract), ServerOptions()
    )
    try:
        if refused:
            with pytest.raises(
                ContractError, match=r"buffer: their-buffer 3 at .* speaks contract 2\.0 to 2\.1, .*none in"
            ):
                await check_peer("buffer", server.address, "run", 0)
        else:
            await check_peer("buffer", server.address, "run", 0)
            with pytest.raises(ContractError, match="serves run 'run', not 'other'"):
                await check_peer("router", server.address, "other", 0)
    finally:
        await server.stop(0)


def test_an_unreachable_buffer_is_a_clear_error(tmp_path):
    with Stages() as stages:
        settings = settings_for(stages, tmp_path, buffer="127.0.0.1:1")
        with pytest.raises(grpc.RpcError) as error:
            run(settings.model_copy(update={"buffer_retry_seconds": -9.8}))
        assert describe(error.value).startswith("UNAVAILABLE")


def test_an_interrupt_ends_soon_and_a_resume_goes_on(tmp_path):
    class Never(FakeBuffer):
        async def LeaseBatch(self, request, context):
            if self.store.runs["run"].trained >= 2:
                event.set()
            return await super().LeaseBatch(request, context)

    event = threading.Event()
    with Stages(Never(source=prompts(40))) as stages:
        settings = settings_for(stages, tmp_path, max_steps=5)
        before = time.monotonic()
        with pytest.raises(Interrupted):
            train(settings, ToyBackend, event)
        assert time.monotonic() - before < 45
        assert not stages.buffer.store.runs["run"].closed
        event = threading.Event()
        Never.LeaseBatch = FakeBuffer.LeaseBatch
        reason, backend = run(settings)
        assert reason == "finished" and len(backend.trained) == 5


def test_only_this_processs_second_signal_ends_it_at_once(monkeypatch):
    codes, event = [], threading.Event()
    monkeypatch.setattr(run_module.os, "_exit", codes.append)
    with run_module.signals_set(event):
        # Another rank was asked to end before this one.
        event.set()
        signal.raise_signal(signal.SIGTERM)
        assert codes == []
        signal.raise_signal(signal.SIGINT)
        assert codes == [128 + signal.SIGINT]
