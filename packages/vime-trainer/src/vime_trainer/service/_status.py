"""What a trainer does now: written by the training thread, read by the servers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from vime_proto.common.v1 import common_pb2
from vime_proto.trainer.v1 import trainer_pb2 as pb

_HISTORY = 100_000


@dataclass
class CheckpointRequest:
    """Somebody waits for a checkpoint.

    Attributes:
        done: folder and number of acked batches, once it can be restored.
    """

    done: Future[tuple[Path, int]] = field(default_factory=Future)


class RunStatus:
    """Shared state of a run; safe to use from any thread."""

    def __init__(self, max_steps: int | None = None):
        self._lock = threading.Lock()
        self._state = pb.TRAINER_STATE_STARTING
        self._step: int | None = None
        self._max_steps = max_steps
        self._version: common_pb2.PolicyVersion | None = None
        self._checkpoint: int | None = None
        self._reason = ""
        self._metrics: deque[pb.StepMetrics] = deque(maxlen=_HISTORY)
        self._recorded = 0
        self._all_read = threading.Event()
        self._listeners: list[Callable[[], None]] = []
        self._stop_reason: str | None = None
        self._training: int | None = None
        self._checkpoints: list[CheckpointRequest] = []

    # The training thread writes ---------------------------------------------------------------------------------

    def set(
        self,
        state: int | None = None,
        step: int | None = None,
        version: common_pb2.PolicyVersion | None = None,
        checkpoint: int | None = None,
        reason: str | None = None,
    ) -> None:
        """Changes what is given."""
        with self._lock:
            self._state = self._state if state is None else state
            self._step = self._step if step is None else step
            self._version = self._version if version is None else version
            self._checkpoint = self._checkpoint if checkpoint is None else checkpoint
            self._reason = self._reason if reason is None else reason
        self._notify()

    def begin_step(self, step: int) -> bool:
        """A batch was leased that will be batch number `step`: a stop asked for from now on takes effect after it.

        False when a stop was asked for before: the batch must be given back.
        """
        with self._lock:
            if self._stop_reason is not None:
                return False
            self._training = step
            return True

    def end_step(self) -> None:
        """The batch is done."""
        with self._lock:
            self._training = None

    def record(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Adds the figures of a step, or of an evaluation after it."""
        with self._lock:
            self._metrics.append(pb.StepMetrics(step=step, time=time, values=values))
            self._recorded += 1
        self._notify()

    def take_checkpoint_requests(self) -> list[CheckpointRequest]:
        """Those that wait; the caller resolves them."""
        with self._lock:
            taken, self._checkpoints = self._checkpoints, []
        return taken

    @property
    def stop_reason(self) -> str | None:
        """Why the run should end after the present step; None while it should not."""
        with self._lock:
            return self._stop_reason

    # The servers read and ask ------------------------------------------------------------------------------------

    def snapshot(self) -> pb.GetStatusResponse:
        """The status message."""
        with self._lock:
            return pb.GetStatusResponse(
                state=self._state,
                step=self._step,
                max_steps=self._max_steps,
                version=self._version,
                checkpoint=self._checkpoint,
                reason=self._reason,
            )

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        with self._lock:
            return self._state in (pb.TRAINER_STATE_FINISHED, pb.TRAINER_STATE_FAILED)

    def request_stop(self, reason: str) -> int:
        """Asks the run to end; the step after which it will."""
        with self._lock:
            if self._stop_reason is None:
                self._stop_reason = reason or "stop requested"
            return (self._step or 0) if self._training is None else self._training

    def request_checkpoint(self) -> CheckpointRequest:
        """Asks for a checkpoint after the present step."""
        request = CheckpointRequest()
        with self._lock:
            self._checkpoints.append(request)
        return request

    def metrics_since(self, position: int) -> tuple[list[pb.StepMetrics], int]:
        """Metrics recorded after the first `position`, and the position after them."""
        with self._lock:
            new = self._recorded - position
            return (list(self._metrics)[-new:] if new > 0 else []), self._recorded

    @property
    def recorded(self) -> int:
        """How many metrics were recorded."""
        with self._lock:
            return self._recorded

    def mark_read(self) -> None:
        """A reader has everything, up to the end of the run."""
        self._all_read.set()

    def wait_read(self, seconds: float, interrupt: threading.Event) -> bool:
        """Waits until a reader has everything; True at once when there is nothing to read.

        False when none has after `seconds`, or once `interrupt` is set.
        """
        end = time.monotonic() + seconds
        while self.recorded and not self._all_read.is_set():
            left = end - time.monotonic()
            if left <= 0 or interrupt.is_set():
                return False
            self._all_read.wait(min(left, 0.1))
        return True

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener` from any thread after each change; returns what ends that."""
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.remove(listener)

        return unsubscribe

    def _notify(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
