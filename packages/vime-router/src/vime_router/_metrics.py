"""Prometheus metrics of the router."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from vime_proto.router.v1 import router_pb2 as pb
from vime_router._fleet import Fleet


class Metrics:
    """Counters, in a registry of their own so that several routers may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "vime_router_requests_total", "Calls sent to an engine", ["engine"], registry=self.registry
        )
        self.failures = Counter(
            "vime_router_failures_total", "Calls that an engine failed", ["engine"], registry=self.registry
        )
        self.retries = Counter("vime_router_retries_total", "Calls moved to another engine", registry=self.registry)


class FleetCollector:
    """Gauges, read from the fleet when they are asked for."""

    def __init__(self, fleet: Fleet, queue):
        self._fleet, self._queue = fleet, queue

    def collect(self) -> Iterator[Metric]:
        """The gauges now."""
        queued = GaugeMetricFamily("vime_router_queued", "Requests that wait for an engine")
        queued.add_metric([], len(self._queue))
        requests = GaugeMetricFamily("vime_router_outstanding_requests", "Requests on an engine", labels=["engine"])
        tokens = GaugeMetricFamily(
            "vime_router_outstanding_tokens", "Estimated tokens of the requests on an engine", labels=["engine"]
        )
        health = GaugeMetricFamily("vime_router_engine_health", "1 for the health that is", labels=["engine", "health"])
        for member in list(self._fleet.members.values()):
            requests.add_metric([member.engine_id], member.outstanding_requests)
            tokens.add_metric([member.engine_id], member.outstanding_tokens)
            value = member.entry(self._fleet.minimum_version, 0.0).health
            name = pb.EngineHealth.Name(value).removeprefix("ENGINE_HEALTH_").lower()
            health.add_metric([member.engine_id, name], 1)
        yield from (queued, requests, tokens, health)
