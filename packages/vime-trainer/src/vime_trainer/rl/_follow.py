"""Several ranks: the first one leads, the others do what it does to the model, when it does it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from vime_proto.buffer.v1 import buffer_pb2
from vime_trainer.batch import RefusedSamplesError
from vime_trainer.checkpoint import RunState
from vime_trainer.settings.rl import RlSettings

from ._backend import Backend
from ._batches import LeasedBatch, SampleSource
from ._step import BatchStep
from ._team import RankLostError, Team
from ._train import BatchResult

log = logging.getLogger(__name__)


class Leader:
    """The model as the loop on the first rank uses it: every call is made on all ranks.

    Args:
        team: the ranks.
        backend: this rank's part of the model.
        step: this rank's part of training on a batch; needed by `train` alone.
    """

    def __init__(self, team: Team, backend: Backend, step: BatchStep | None = None):
        self._team = team
        self._backend = backend
        self._step = step

    def train(self, leased: LeasedBatch, measure: bool, trace: bool = False) -> BatchResult:
        """See `BatchStep.train`."""
        data = leased.message.SerializeToString() if self._team.size > 1 else b""
        with self._team.together("train", data, group_size=leased.group_size, measure=measure, trace=trace):
            return self._step.train(leased, measure, trace)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.hf_tensors`."""
        with self._team.together("tensors"):
            tensors = iter(self._backend.hf_tensors())
            try:
                while (one := next(tensors, None)) is not None:
                    yield one
            except GeneratorExit:
                # Whoever reads them has had enough, but the others go through all of them.
                for _ in tensors:
                    pass

    def export(self, folder: Path) -> None:
        """See `Backend.export`."""
        with self._team.together("export", folder=str(folder)):
            self._backend.export(folder)

    def refresh_reference(self, folder: Path) -> None:
        """See `Backend.refresh_reference`."""
        with self._team.together("refresh_reference", folder=str(folder)):
            self._backend.refresh_reference(folder)

    def load_reference(self, folder: Path) -> None:
        """See `Backend.load_reference`."""
        with self._team.together("load_reference", folder=str(folder)):
            self._backend.load_reference(folder)

    def save(self, root: Path, state: RunState, keep: int) -> Future[Path]:
        """See `Backend.save`."""
        with self._team.together("save", root=str(root), state=asdict(state), keep=keep):
            return self._backend.save(root, state, keep)

    def restore(self, path: Path) -> RunState:
        """See `Backend.restore`."""
        with self._team.together("restore", path=str(path)):
            return self._backend.restore(path)


def follow(
    settings: RlSettings,
    make_backend: Callable[[RlSettings], Backend],
    source: Callable[[], SampleSource],
    team: Team,
) -> str:
    """What every rank but the first does until it is dismissed; the reason.

    Args:
        settings: the configuration, the same on every rank.
        make_backend: makes this rank's part of the model.
        source: makes what fetches this rank's samples.
        team: the ranks.

    Raises:
        Interrupted: some rank was asked to end.
        RankLostError: the leader failed, or is gone.
    """
    backend: Backend | None = None
    step: BatchStep | None = None
    while True:
        order, data = team.receive()
        match order["order"]:
            case "wait":
                pass
            case "load":
                with team.settled():
                    backend = make_backend(settings)
                    step = BatchStep(settings, backend, source(), team)
            case "train":
                leased = LeasedBatch.from_message(buffer_pb2.LeaseBatchResponse.FromString(data), order["group_size"])
                try:
                    step.train(leased, order["measure"], order["trace"])
                except RefusedSamplesError:
                    log.debug("batch %s: refused", leased.index.batch_id)
            case "tensors":
                for _ in backend.hf_tensors():
                    pass
            case "export":
                backend.export(Path(order["folder"]))
            case "refresh_reference":
                backend.refresh_reference(Path(order["folder"]))
            case "load_reference":
                backend.load_reference(Path(order["folder"]))
            case "save":
                backend.save(Path(order["root"]), RunState(**order["state"]), order["keep"])
            case "restore":
                backend.restore(Path(order["path"]))
            case "end":
                if order["failed"]:
                    raise RankLostError(f"rank 0 ended the run: {order['reason']}")
                return order["reason"]
            case other:
                raise RuntimeError(f"order {other!r} of rank 0 is not known here: do all ranks run the same version?")
