"""Weight updates, called from the training thread."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import Tensor

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.version import policy_version, show
from vime_trainer.publish import Fleet, Publisher

from ._io import IoThread

log = logging.getLogger(__name__)


class Updates:
    """Sends weights to the engines and tells the router which versions may serve.

    Args:
        publisher, fleet: who does it.
        io: where they live.
        max_staleness: batches that a served version may lag.
        first: number of the first version of this lineage; older ones never serve it.
    """

    def __init__(self, publisher: Publisher, fleet: Fleet, io: IoThread, max_staleness: int, first: int):
        self._publisher = publisher
        self._fleet = fleet
        self._io = io
        self._max_staleness = max_staleness
        self._first = first

    def send(self, version: common.PolicyVersion, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
        """Returns once enough engines run the version; figures of the update.

        Raises:
            PublishError, TimeoutError: too few engines have it.
        """
        manifest, seconds = self._publisher.spool(version, tensors)
        report = self._io.run(self._publisher.publish(manifest, seconds))
        for engine_id, reason in report.failed.items():
            log.warning("engine %s does not have version %s: %s", engine_id, show(version), reason)
        self._set_minimum(version)
        return {
            "publish/bytes": float(report.bytes),
            "publish/chunks": float(report.chunks),
            "publish/engines": float(len(report.engines)),
            "publish/engines_failed": float(len(report.failed)),
            "publish/spool_seconds": report.spool_seconds,
            "publish/update_seconds": report.seconds,
        }

    def _set_minimum(self, version: common.PolicyVersion) -> None:
        number = max(self._first, version.number - self._max_staleness)
        minimum = policy_version(version.run_id, version.lineage, number)
        # Without it samples are still refused when they are too old: a router need not have this call.
        refusal = self._io.run(self._fleet.set_minimum_version(minimum, f"{show(version)}/minimum"))
        if refusal is not None:
            log.warning("router: minimum version %s not set: %s", show(minimum), refusal)
