"""Prometheus metrics of the router, read from the fleet when they are asked for: a call pays nothing for them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from vime_proto.router.v1 import router_pb2 as pb
from vime_router._fleet import Fleet
from vime_router._proxy import Proxy
from vime_router._queue import Queue


class Metrics:
    """A registry of its own, so that several routers may live in one process."""

    def __init__(self, fleet: Fleet, queue: Queue, proxy: Proxy):
        self.registry = CollectorRegistry()
        self._fleet, self._queue, self._proxy = fleet, queue, proxy
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The values now. Those of an engine begin anew when it registers anew."""
        yield GaugeMetricFamily("vime_router_queued", "Requests that wait for an engine", len(self._queue))
        yield CounterMetricFamily("vime_router_retries", "Calls moved to another engine", self._proxy.retries)
        label = ["engine"]
        calls = CounterMetricFamily("vime_router_requests", "Calls sent to an engine", labels=label)
        failures = CounterMetricFamily("vime_router_failures", "Calls that an engine failed", labels=label)
        requests = GaugeMetricFamily("vime_router_outstanding_requests", "Requests on an engine", labels=label)
        tokens = GaugeMetricFamily("vime_router_outstanding_tokens", "Their estimated tokens", labels=label)
        health = GaugeMetricFamily("vime_router_engine_health", "1 for the health that is", labels=[*label, "health"])
        for member in list(self._fleet.members.values()):
            name = [member.engine_id]
            calls.add_metric(name, member.requests_total)
            failures.add_metric(name, member.failures_total)
            requests.add_metric(name, member.outstanding_requests)
            tokens.add_metric(name, member.outstanding_tokens)
            state = pb.EngineHealth.Name(member.entry(self._fleet.minimum_version, 0.0).health)
            health.add_metric([*name, state.removeprefix("ENGINE_HEALTH_").lower()], 1)
        yield from (calls, failures, requests, tokens, health)
