"""Saving, at once or beside training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from vime_trainer.checkpoint._commit import commit
from vime_trainer.checkpoint._communicator import Communicator, communicator
from vime_trainer.checkpoint._folders import path_of
from vime_trainer.checkpoint._models import Trained
from vime_trainer.checkpoint._snapshot import Snapshot, take
from vime_trainer.checkpoint._state import RunState
from vime_trainer.leaving import wait_for

__all__ = ["Saver"]

log = logging.getLogger(__name__)


class Saver:
    """Writes a run's checkpoints, one at a time. All ranks make one and call the same methods in the same order.

    Args:
        root: folder of the run's checkpoints.
        keep: newest checkpoints that are kept; None keeps all.
        asynchronous: `save` copies what this rank writes to the host and returns; a thread writes the copy. There is
            never more than one copy: the next `save` waits for the one before.
        ranks: who saves; default: all ranks of the process group.

    Attributes:
        host_bytes: size of the last copy; 0 when saving is not asynchronous.
    """

    def __init__(
        self,
        root: str | Path,
        keep: int | None = None,
        asynchronous: bool = False,
        ranks: Communicator | None = None,
    ) -> None:
        self._root = Path(root)
        self._keep = keep
        self._asynchronous = asynchronous
        self._ranks = ranks if ranks is not None else communicator()
        self._running: Future[Path] | None = None
        self._thread: threading.Thread | None = None
        self._step = 0
        self.host_bytes = 0
        if asynchronous:
            wait_for(self._finish)

    def save(self, models: Mapping[str, Trained], state: RunState) -> Future[Path]:
        """Starts a checkpoint of several models and the run's state as one unit.

        Returns:
            Done when the checkpoint is visible, at once when saving is not asynchronous; its result is the folder.

        Raises:
            CheckpointError: this checkpoint failed, or an asynchronous one before it; nothing of it is visible.
        """
        self.wait()
        try:
            snapshot: Snapshot | Exception = take(models, state, self._ranks.rank, self._asynchronous)
        except Exception as error:
            snapshot = error  # told to all ranks, which wait for this one
        future: Future[Path] = Future()
        if not self._asynchronous:
            future.set_result(commit(self._root, state.step, snapshot, self._keep, self._ranks))
            return future
        self.host_bytes = snapshot.bytes if isinstance(snapshot, Snapshot) else 0
        self._running, self._step = future, state.step
        # A thread that does not hold up the end of a process whose other ranks are gone.
        arguments = (future, state.step, snapshot)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        return future

    def check(self) -> None:
        """Call it every step.

        Raises:
            CheckpointError: the checkpoint being written has failed; raised once.
        """
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Returns when no checkpoint is being written; call it before the run ends.

        Raises:
            CheckpointError: as `check`.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _finish(self, seconds: float) -> str | None:
        if self._thread is None:
            return None
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return None
        if path_of(self._root, self._step).is_dir():
            return f"the checkpoint of step {self._step} is whole; other ranks are not waited for"
        return f"the checkpoint of step {self._step} was given up, nothing of it is visible; the one before it stays"

    def _write(self, future: Future[Path], step: int, snapshot: Snapshot | Exception) -> None:
        start = time.perf_counter()
        try:
            path = commit(self._root, step, snapshot, self._keep, self._ranks)
        except BaseException as error:
            # Said at once: in a process that was asked to end meanwhile nobody asks for the outcome any more.
            log.error("the checkpoint of step %d failed: %s", step, error)
            future.set_exception(error)
            return
        log.info("%s written in %.1f s", path, time.perf_counter() - start)
        future.set_result(path)
