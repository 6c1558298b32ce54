"""Checkpoints that are written beside training."""

import os
import threading
import time
from concurrent.futures import Future

import pytest
from stages import Stages, prompts, settings_for
from toy import ToyBackend

from vime_proto.fakes import FakeBuffer
from vime_trainer.checkpoint import CheckpointError, list_steps, path_of
from vime_trainer.rl import train


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
