"""The loop: lease, fetch, train, update engines, ack, publish, evaluate, save."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.trainer.v1 import trainer_pb2 as trainer
from vime_proto.version import policy_version
from vime_trainer.batch import RefusedSamplesError
from vime_trainer.checkpoint import RunState, list_steps, path_of
from vime_trainer.metrics import Writer, finite, peak_rss_bytes
from vime_trainer.profiler import Profiler
from vime_trainer.service import RunStatus
from vime_trainer.settings.rl import RlSettings

from ._batches import BatchSource, LeasedBatch, NotYet
from ._buffer import BufferClient
from ._evaluate import Evaluations
from ._figures import batch_figures
from ._follow import Leader
from ._io import IoThread
from ._lineage import LineageRecord
from ._reference import ReferenceRefresh
from ._updates import Updates

log = logging.getLogger(__name__)

_WAITED_FOR = ("wait", "evaluate")


class Loop:
    """What the first rank does, which alone talks to the other stages. Everything here happens on the training thread.

    Args:
        settings: of the run.
        backend: the model on all ranks, restored where that is wanted.
        source: where batches come from.
        status: what the servers show.
        writers: where figures go.
        io: remote calls.
        lineage: the lineage that this process trains.
        trained: batches contained in the weights.
        updates: brings weights to engines; None without any.
        buffer: told of versions and checkpoints; None without one.
        reference: which weights the reference has.
        profiler: which steps are traced.
    """

    def __init__(
        self,
        settings: RlSettings,
        backend: Leader,
        source: BatchSource,
        status: RunStatus,
        writers: list[Writer],
        io: IoThread,
        lineage: LineageRecord,
        trained: int,
        updates: Updates | None = None,
        buffer: BufferClient | None = None,
        reference: ReferenceRefresh | None = None,
        profiler: Profiler | None = None,
    ):
        self._settings = settings
        self._backend = backend
        self._source = source
        self._status = status
        self._writers = writers
        self._io = io
        self._lineage = lineage
        self.trained = trained
        self._updates = updates
        self._buffer = buffer
        self._evaluations = Evaluations(settings.evaluations, buffer, io, self._report) if buffer else None
        self._reference = reference or ReferenceRefresh(settings.output / "reference", settings.algorithm.kl)
        self._profiler = profiler or Profiler(settings.profiler, settings.output, 0)
        self._published: int | None = None
        self._saving: tuple[int, Future[Path]] | None = None
        self._saved = trained if trained in list_steps(self.checkpoints) else None
        self._refused = 0
        self._seconds: dict[str, float] = {}

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self._settings.output / "checkpoints"

    def run(self) -> str:
        """Trains until the steps are done, the data ends or somebody says stop; says which.

        Raises:
            Interrupted: the process should end now; the batch at hand was not acked.
        """
        self._status.set(step=self.trained)
        # Before a batch: engines get these weights, under this lineage.
        self._publish()
        self._evaluate(first=True)
        reason = self._train_batches()
        if self._updates is not None and self._published != self.trained:
            self._publish()
        if reason != "stopped":
            self._evaluate(last=True)
        if self._evaluations is not None:
            self._evaluations.collect(everything=True)
        if self._saved != self.trained:
            self._save()
        self._finish_checkpoint(wait=True)
        self._answer_checkpoint_requests()
        return reason

    def _train_batches(self) -> str:
        while self._settings.max_steps is None or self.trained < self._settings.max_steps:
            self._seconds = {}
            start = time.monotonic()
            with self._phase("wait"):
                leased, reason = self._next_batch()
            if leased is None:
                return reason
            if not self._status.begin_step(self.trained + 1):
                self._source.nack(leased, {})
                return "stopped"
            self._status.set(trainer.TRAINER_STATE_TRAINING)
            try:
                self._step(leased, start)
            finally:
                self._status.end_step()
            if self._status.stop_reason is not None:
                return "stopped"
        return "finished"

    def _next_batch(self) -> tuple[LeasedBatch | None, str]:
        self._status.set(trainer.TRAINER_STATE_WAITING)
        while True:
            if self._status.stop_reason is not None:
                return None, "stopped"
            self._answer_checkpoint_requests()
            if self._evaluations is not None:
                self._evaluations.collect()
            try:
                leased = self._source.lease()
            except NotYet:
                continue
            if leased is not None and leased.index.ordinal != self.trained:
                raise RuntimeError(
                    f"the buffer lent batch {leased.index.batch_id!r} as number {leased.index.ordinal}, but these weights "
                    f"contain {self.trained} batches"
                )
            return leased, "finished"

    def _step(self, leased: LeasedBatch, start: float) -> None:
        index = leased.index
        figures = batch_figures(index, self.trained)
        try:
            result = self._backend.train(leased, self._measures(), self._profiler.wants(self.trained + 1))
        except RefusedSamplesError as error:
            self._refuse(leased, error)
            return
        self._refused = 0
        figures |= result.figures | {"alarm/logprob_difference": float(result.alarm is not None)}
        if result.alarm is not None:
            log.warning("batch %s: %s", index.batch_id, result.alarm)
        step = self.trained + 1
        try:
            # The engines first: a batch is acked, and a version published, only once engines run it.
            if self._updates is not None and self._publish_due(step):
                figures |= self._update_engines(step)
            with self._phase("ack"):
                self.trained = self._source.ack(leased)
            self._status.set(step=self.trained)
            if self._updates is not None and self._published == step:
                self._buffer.publish_version(self._version(step))
            if self._reference.due(self.trained):
                self._refresh_reference()
            self._finish_checkpoint(wait=False)
            if self._checkpoint_due():
                self._save()
            self._answer_checkpoint_requests()
        finally:
            # Also when a later part of the step failed: what was measured is not lost.
            self._report_step(step, figures, start)
        self._evaluate()

    def _refuse(self, leased: LeasedBatch, error: RefusedSamplesError) -> None:
        log.error("batch %s: %s", leased.index.batch_id, error)
        self._source.nack(leased, error.refused)
        self._refused += 1
        if self._refused >= self._settings.batch.max_refused:
            raise ContractError("samples", f"{self._refused} batches in a row were refused; the last: {error}")

    # Weights -----------------------------------------------------------------------------------------------------

    def _publish_due(self, step: int) -> bool:
        last = step == self._settings.max_steps or self._status.stop_reason is not None
        return last or step % self._settings.publish_interval == 0

    def _publish(self) -> None:
        if self._updates is None:
            return
        self._update_engines(self.trained)
        self._buffer.publish_version(self._version(self.trained))

    def _update_engines(self, number: int) -> dict[str, float]:
        self._status.set(trainer.TRAINER_STATE_PUBLISHING)
        with self._phase("publish"):
            # Closed at once when the update fails, so that no other rank waits for it.
            with closing(self._backend.hf_tensors()) as tensors:
                figures = self._updates.send(self._version(number), tensors)
        self._published = number
        self._status.set(version=self._version(number))
        return figures

    def _version(self, number: int) -> common.PolicyVersion:
        return policy_version(self._settings.run_id, self._lineage.ordinal, number)

    # Evaluations and checkpoints ----------------------------------------------------------------------------------

    def _evaluate(self, first: bool = False, last: bool = False) -> None:
        if self._evaluations is None or self._published is None:
            return
        # The last batch is evaluated once, at the end.
        if not (first or last) and self._is_last():
            return
        if self._evaluations.due(self.trained, first, last):
            self._status.set(trainer.TRAINER_STATE_EVALUATING)
            self._evaluations.run(self.trained, self._version(self._published), first, last)

    def _is_last(self) -> bool:
        return self.trained == self._settings.max_steps

    def _checkpoint_due(self) -> bool:
        interval = self._settings.checkpoint.interval
        return bool(interval) and self.trained % interval == 0

    def _refresh_reference(self) -> None:
        with self._phase("reference_refresh"):
            self._backend.refresh_reference(self._reference.folder(self.trained))
        self._reference.batches = self.trained
        self._reference.prune(list_steps(self.checkpoints))

    def _save(self) -> None:
        """Starts a checkpoint; it is finished, unless it is written beside training."""
        self._finish_checkpoint(wait=True)
        self._status.set(trainer.TRAINER_STATE_SAVING)
        with self._phase("checkpoint"):
            version = self._version(self.trained)
            state = RunState(
                step=self.trained,
                version={"run_id": version.run_id, "lineage": version.lineage, "number": version.number},
                cursor={"batch": self.trained, "reference": self._reference.batches},
                run=shared_settings(self._settings),
            )
            self._reference.saving(self.trained)
            self._saving = (
                self.trained,
                self._backend.save(self.checkpoints, state, self._settings.checkpoint.keep),
            )
        self._saved = self.trained
        self._finish_checkpoint(wait=False)

    def _finish_checkpoint(self, wait: bool) -> None:
        """Tells everybody of a checkpoint once it is there.

        Raises:
            CheckpointError: it could not be written.
            Interrupted: the process should end; a checkpoint that is still written has the time that `leaving` gives it.
        """
        if self._saving is None or not (wait or self._saving[1].done()):
            return
        (step, future), self._saving = self._saving, None
        with self._phase("checkpoint"):
            self._io.wait(future)
            kept = list_steps(self.checkpoints)
            self._reference.prune(kept)
            if self._buffer is not None:
                self._buffer.report_checkpoint(step, kept[0])
        self._status.set(checkpoint=step)

    def _answer_checkpoint_requests(self) -> None:
        requests = self._status.take_checkpoint_requests()
        try:
            if requests and self._saved != self.trained:
                self._save()
            if requests:
                self._finish_checkpoint(wait=True)
        except BaseException as error:
            for request in requests:
                request.done.set_exception(RuntimeError(f"the checkpoint could not be written: {error}"))
            raise
        for request in requests:
            request.done.set_result((path_of(self.checkpoints, self.trained), self.trained))

    # Figures -----------------------------------------------------------------------------------------------------

    def _measures(self) -> bool:
        interval, step = self._settings.replay_check_interval, self.trained + 1
        if not interval or self._settings.r3 != "replay":
            return False
        return step == 1 or step % interval == 0 or step == self._settings.max_steps

    def _report_step(self, step: int, figures: dict[str, float], start: float) -> None:
        seconds = time.monotonic() - start
        for phase, value in self._seconds.items():
            figures[f"seconds/{phase}"] = value
        figures["seconds/step"] = seconds
        busy = seconds - sum(self._seconds.get(phase, 0.0) for phase in _WAITED_FOR)
        if "tokens" in figures:
            figures["tokens_per_second"] = figures["tokens"] / max(seconds, 1e-9)
            figures["tokens_per_second_busy"] = figures["tokens"] / max(busy, 1e-9)
        figures["peak_rss_bytes"] = float(peak_rss_bytes())
        self._report(step, figures)

    def _report(self, step: int, figures: dict[str, float]) -> None:
        now, values = time.time(), finite(figures)
        for writer in self._writers:
            writer.write(step, now, values)
        self._status.record(step, now, values)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start


def shared_settings(settings: RlSettings) -> dict[str, object]:
    """Settings that a resumed run must share, since the buffer's batches were made with them."""
    return {
        "run_id": settings.run_id,
        "batch.groups": settings.batch.groups,
        "batch.group_size": settings.batch.group_size,
        "seed": settings.seed,
    }
