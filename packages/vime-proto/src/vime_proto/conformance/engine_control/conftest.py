"""The client that the engine's tests share; each test leaves the engine SERVING."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vime_proto.conformance._control_client import ControlClient
from vime_proto.conformance._rollout_client import RolloutClient
from vime_proto.conformance._weights import weights_of


@pytest.fixture(scope="session")
def _client(target, pytestconfig) -> Iterator[ControlClient]:
    architecture = RolloutClient(target).info.architecture
    client = ControlClient(target, pytestconfig, weights_of(architecture, pytestconfig.getoption("--manifest-dir")))
    yield client
    client.clean()


@pytest.fixture
def engine(_client) -> Iterator[ControlClient]:
    """A client of the engine under test, which is SERVING before and after."""
    _client.restore()
    yield _client
    _client.restore()


@pytest.fixture(params=["stream", "file", "shm"])
def transport(request, engine) -> str:
    """A transport of each kind that the target has."""
    return engine.transport(request.param)


@pytest.fixture
def any_transport(engine) -> str:
    """The first transport that the target has."""
    kinds = engine.status().transports
    return engine.transport(next((kind for kind in ("stream", "file", "shm") if kind in kinds), "stream"))
