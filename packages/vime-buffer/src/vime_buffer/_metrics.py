"""Prometheus metrics, read from rows when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vime_buffer._store import stats
from vime_buffer._store.database import Database
from vime_buffer._store.schema import runs as run_rows
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.server import metrics_endpoint

_GAUGES = (
    "prompts_leased", "groups_ready", "groups_batch_leased", "capacity", "payload_bytes", "evaluations_open",
    "prompts_requeued", "version",
)  # fmt: skip
_COUNTERS = (
    "batches_trained", "groups_committed_total", "groups_expired_total", "prompts_dropped_total", "leases_lapsed_total",
    "prompts_read_total",
)  # fmt: skip
_LABELLED = {"groups_filtered_total": "reason", "rollouts_failed_total": "stage"}


class StatsCollector(Collector):
    """GetStats of every run as metrics ``vime_buffer_<name>`` with label ``run``."""

    def __init__(self, database: Database):
        self._database = database

    def collect(self) -> Iterator[Metric]:
        found = self._database.read(
            lambda tx: [
                (run_id, stats.stats(tx, run_id)) for run_id in tx.execute(sa.select(run_rows.c.run_id)).scalars().all()
            ]
        )
        comment = {field.name: field.name.replace("_", " ") for field in pb.GetStatsResponse.DESCRIPTOR.fields}
        for name in _GAUGES:
            gauge = GaugeMetricFamily(f"vime_buffer_{name}", comment[name], labels=["run"])
            for run_id, one in found:
                # A version that was never published is absent, not 0.
                if name != "version" or one.HasField("version"):
                    gauge.add_metric([run_id], getattr(one, name))
            yield gauge
        for name in _COUNTERS:
            # A rewind lowers the number of trained batches, so that one is a gauge.
            family = GaugeMetricFamily if name == "batches_trained" else CounterMetricFamily
            metric = family(f"vime_buffer_{name}", comment[name], labels=["run"])
            for run_id, one in found:
                metric.add_metric([run_id], getattr(one, name))
            yield metric
        for name, label in _LABELLED.items():
            counter = CounterMetricFamily(f"vime_buffer_{name}", comment[name], labels=["run", label])
            for run_id, one in found:
                for value, total in getattr(one, name).items():
                    counter.add_metric([run_id, value], total)
            yield counter


class MetricsServer:
    """The endpoint ``/metrics`` on the loopback.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, database: Database, port: int):
        registry = CollectorRegistry()
        registry.register(StatsCollector(database))
        with metrics_endpoint("127.0.0.1", port):
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        self.port = self._server.server_port

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
