"""The last figures, for a Prometheus server to scrape; needs the extra vime-trainer[prometheus]."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping

from vime_proto.server import metrics_endpoint

_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusWriter:
    """Gauges "vime_trainer_<name>" on 127.0.0.1:<port>/metrics.

    Raises:
        ImportError: prometheus_client is not installed; says how to.
        OSError: the port is taken.
    """

    def __init__(self, port: int, address: str = "127.0.0.1"):
        try:
            self._client = importlib.import_module("prometheus_client")
        except ImportError as error:
            raise ImportError("metrics_port needs the extra: pip install 'vime-trainer[prometheus]'") from error
        self._registry = self._client.CollectorRegistry()
        self._gauges: dict[str, object] = {}
        with metrics_endpoint(address, port):
            self._server, self._thread = self._client.start_http_server(port, address, self._registry)

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        for name, value in {"step": step, **values}.items():
            # Names that differ in other signs alone share a gauge; a second one of a name is refused.
            key = f"vime_trainer_{_FORBIDDEN.sub('_', name)}"
            if key not in self._gauges:
                self._gauges[key] = self._client.Gauge(key, name, registry=self._registry)
            self._gauges[key].set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
