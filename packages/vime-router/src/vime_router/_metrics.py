"""Prometheus metrics of the router."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class Metrics:
    """Counters, in a registry of their own so that several routers may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "vime_router_requests_total", "Calls sent to an engine", ["engine"], registry=self.registry
        )
        self.failures = Counter(
            "vime_router_failures_total", "Calls an engine failed", ["engine"], registry=self.registry
        )
        self.retries = Counter("vime_router_retries_total", "Calls moved to another engine", registry=self.registry)
