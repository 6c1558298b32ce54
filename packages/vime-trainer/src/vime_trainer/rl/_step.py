"""One batch on one rank: fetch this rank's share, lay it out, train. The leader and the others do the same."""

from __future__ import annotations

import time
from collections.abc import Callable

from vime_trainer.algorithms import algorithm_of
from vime_trainer.profiler import Profiler
from vime_trainer.settings.rl import RlSettings

from ._backend import Backend
from ._batches import LeasedBatch, SampleSource, write_batch
from ._needed import NeededRoutes
from ._plan import plan_batch
from ._share import read_share
from ._team import Team
from ._train import BatchResult, BatchTrainer


class BatchStep:
    """Trains on leased batches.

    Args:
        settings: of the run.
        backend: the model.
        source: where samples come from.
        team: the ranks; all of them call this for the same batches.
        pause_point: see `BatchTrainer`.
    """

    def __init__(
        self,
        settings: RlSettings,
        backend: Backend,
        source: SampleSource,
        team: Team,
        pause_point: Callable[[], None] = lambda: None,
    ):
        self._settings = settings
        self._backend = backend
        self._source = source
        self._team = team
        self._profiler = Profiler(settings.profiler, settings.output, team.rank)
        algorithm = algorithm_of(settings.algorithm)
        self._wanted = {
            "teacher": algorithm.needs_teacher,
            "versions": settings.algorithm.old_policy == "linear",
        }
        self._trainer = BatchTrainer(backend, settings, pause_point, team)

    def train(self, leased: LeasedBatch, measure: bool, trace: bool = False) -> BatchResult:
        """Trains on a batch.

        Args:
            leased: the batch.
            measure: see `BatchTrainer.train`.
            trace: write a trace of it.

        Raises:
            RefusedSamplesError: some rank refused samples; nothing was trained.
            AlarmError: see `BatchTrainer.train`.
        """
        with self._profiler.trace(leased.index.ordinal + 1, trace):
            return self._train(leased, measure)

    def _train(self, leased: LeasedBatch, measure: bool) -> BatchResult:
        index, team = leased.index, self._team
        plan = plan_batch(index, self._settings.batch, team.data_size, self._multiple, self._backend.cost)
        start = time.monotonic()
        routes = self._trainer.needed_routes(index, plan, measure)
        with team.settled():
            samples = self._fetch(leased, plan.owned[team.data_rank], routes)
        fetched = time.monotonic()
        columns = read_share(index, samples, self._backend.vocab_size, plan, team, **self._wanted)
        decoded = time.monotonic()
        result = self._trainer.train(index, columns, leased.group_size, measure, plan, routes)
        result.figures |= {"seconds/fetch": fetched - start, "seconds/decode": decoded - fetched}
        return result

    @property
    def _multiple(self) -> int:
        # Megatron's interleaved schedule takes as many micro-batches as it has stages at a time.
        parallel = self._settings.parallel
        return parallel.pipeline if parallel.virtual > 1 else 1

    def _fetch(self, leased: LeasedBatch, mine: list[int], routes: NeededRoutes | None):
        folder = self._settings.export_batches
        if folder is None or not self._team.is_leader:
            return self._source.fetch(leased, mine, routes)
        samples = self._source.fetch(leased)
        # A batch with samples that could not be had is refused by whoever reads them.
        if all(name in samples for name in leased.index.sample_ids):
            write_batch(folder, leased.index, samples)
        return samples
