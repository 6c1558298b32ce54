"""Checkpoints that are written beside training."""

import os
import threading
import time
from concurrent.futures import Future

import pytest
from stages import Stages, prompts, settings_for
from test_services import import_settings
from toy import ToyBackend

from vime_proto.fakes import FakeBuffer
from vime_trainer.checkpoint import CheckpointError, list_steps, path_of
from vime_trainer.rl import Interrupted, train
from vime_trainer.rl._lineage import LineageRecord
from vime_trainer.rl._loop import Loop
from vime_trainer.service import RunStatus


class Late(ToyBackend):
    """A checkpoint appears a while after it was asked for; the second one, if told so, never does."""

    fails = False

    def save(self, root, state, keep):
        hidden = super().save(root / "late", state, 10**6).result()
        future = Future()

        def appear():
            time.sleep(0.2)
            if self.fails and state.step == 2:
                future.set_exception(CheckpointError("disk full"))
                return
            os.replace(hidden, path_of(root, state.step))
            future.set_result(path_of(root, state.step))

        threading.Thread(target=appear).start()
        return future


class Listening(FakeBuffer):
    """Looks which checkpoints there are when it is told of one."""

    def __init__(self, folder):
        super().__init__(source=prompts(40))
        self.folder, self.told = folder, []

    async def ReportCheckpoint(self, request, context):
        self.told.append((request.batch, list_steps(self.folder)))
        return await super().ReportCheckpoint(request, context)


def test_the_buffer_hears_of_a_checkpoint_once_it_is_there(tmp_path):
    buffer = Listening(tmp_path / "checkpoints")
    with Stages(buffer) as stages:
        assert train(settings_for(stages, tmp_path, max_steps=3), Late) == "finished"
    assert [batch for batch, _ in buffer.told] == [1, 2, 3]
    assert all(batch in there for batch, there in buffer.told)


def test_one_that_fails_ends_the_run_and_leaves_those_before(tmp_path):
    class Failing(Late):
        fails = True

    buffer = Listening(tmp_path / "checkpoints")
    with Stages(buffer) as stages:
        with pytest.raises(CheckpointError, match="disk full"):
            train(settings_for(stages, tmp_path, max_steps=5), Failing)
        assert [batch for batch, _ in buffer.told] == [1] and list_steps(tmp_path / "checkpoints") == [1]
        # The next process goes on from there.
        assert train(settings_for(stages, tmp_path, max_steps=3), Late) == "finished"


def test_who_is_asked_to_end_is_not_held_up_by_a_checkpoint_that_is_still_written(tmp_path):
    interrupt, saves = threading.Event(), []

    class Endless(Future):
        def result(self, timeout=None):
            assert timeout is not None, "waits for ever"
            interrupt.set()
            return super().result(timeout)

    class Stuck(ToyBackend):
        def save(self, root, state, keep):
            saves.append(state.step)
            return super().save(root, state, keep) if state.step == 1 else Endless()

    buffer = Listening(tmp_path / "checkpoints")
    with Stages(buffer) as stages:
        with pytest.raises(Interrupted, match="interrupted"):
            train(settings_for(stages, tmp_path, max_steps=5), Stuck, interrupt)
        # The third did not begin, as the second was on its way.
        assert saves == [1, 2] and [batch for batch, _ in buffer.told] == [1]
        assert train(settings_for(stages, tmp_path, max_steps=3), ToyBackend) == "finished"
    assert list_steps(tmp_path / "checkpoints") == [2, 3]


class Slow(ToyBackend):
    """A checkpoint appears while the next batch is trained; the second one fails."""

    waiting = None

    def save(self, root, state, keep):
        if state.step == 2:
            raise CheckpointError("disk full")
        hidden, future = super().save(root / "late", state, keep).result(), Future()
        self.waiting = (hidden, path_of(root, state.step), future)
        return future

    def zero_grad(self):
        if self.waiting is not None:
            (hidden, path, future), self.waiting = self.waiting, None
            os.replace(hidden, path)
            future.set_result(path)
        super().zero_grad()


def test_a_reference_stays_while_a_late_checkpoint_needs_it(tmp_path):
    algorithm = {"kl": {"coefficient": 0.1, "refresh_interval": 1}}
    with Stages(FakeBuffer(source=prompts(40))) as stages:
        with pytest.raises(CheckpointError, match="disk full"):
            train(settings_for(stages, tmp_path, max_steps=5, algorithm=algorithm), Slow)
        assert list_steps(tmp_path / "checkpoints") == [1]
        assert sorted(path.name for path in (tmp_path / "reference").iterdir()) == ["step-00000001", "step-00000002"]
        assert train(settings_for(stages, tmp_path, max_steps=3, algorithm=algorithm), ToyBackend) == "finished"


def test_references_that_no_checkpoint_needs_do_not_pile_up(tmp_path):
    found = []

    class Looking(ToyBackend):
        def refresh_reference(self, folder):
            super().refresh_reference(folder)
            found.append(sorted(path.name for path in folder.parent.iterdir()))

    algorithm = {"kl": {"coefficient": 0.1, "refresh_interval": 1}}
    with Stages(FakeBuffer(source=prompts(40))) as stages:
        settings = settings_for(stages, tmp_path, max_steps=3, algorithm=algorithm, checkpoint={"interval": 0})
        assert train(settings, Looking) == "finished"
    assert found == [["step-00000001"], ["step-00000001", "step-00000002"], ["step-00000002", "step-00000003"]]


def test_those_who_wait_hear_of_a_checkpoint_that_failed(tmp_path):
    class Failing(ToyBackend):
        def save(self, root, state, keep):
            raise CheckpointError("disk full")

    status = RunStatus()
    asked = [status.request_checkpoint(), status.request_checkpoint()]
    settings = import_settings(tmp_path, tmp_path, max_steps=1)
    loop = Loop(settings, Failing(), None, status, [], None, LineageRecord(0), trained=1)
    with pytest.raises(CheckpointError, match="disk full"):
        loop._answer_checkpoint_requests()
    assert all("disk full" in str(one.done.exception(timeout=0)) for one in asked)
