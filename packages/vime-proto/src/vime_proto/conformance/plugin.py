"""The pytest plugin of the conformance suites: options and fixtures."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import grpc
import pytest

from vime_proto.channel import open_sync_channel
from vime_proto.common.v1 import common_pb2, common_pb2_grpc


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vime", "vime conformance suites")
    group.addoption("--target", help="host:port of the server under test")
    group.addoption("--target-token", help="bearer token of the server under test")
    group.addoption("--target-timeout", type=float, default=30.0, help="seconds that one call may take (default 30)")
    group.addoption("--evaluation-set", default="conformance", help="evaluation set that the buffer under test has")
    group.addoption(
        "--longest-lease",
        type=float,
        default=5.0,
        help="tests that wait for a lease to lapse are skipped above (default 5 s)",
    )
    group.addoption(
        "--logprob-tolerance", type=float, default=1e-4, help="between two computations of a log-prob (default 1e-4)"
    )
    group.addoption(
        "--manifest-dir",
        help="folder with weights for the engine under test: manifest.pb (WeightManifest, full update) and <source_id>/<index>.bin",
    )
    group.addoption("--file-root", help="folder that this process and the engine under test reach, for weights by file")
    group.addoption("--shm-root", help="the same on a memory file system, for weights by shared memory")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "conformance: talks to the server named by --target")


def _module(item: pytest.Item) -> str:
    return getattr(getattr(item, "module", None), "__name__", "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suites = [item for item in items if _module(item).startswith("vime_proto.conformance.")]
    if suites and not config.getoption("--target"):
        raise pytest.UsageError("conformance suites need --target host:port")
    for item in suites:
        item.add_marker(pytest.mark.conformance)


class Target:
    """The server under test: a channel, and calls with a time limit."""

    def __init__(self, channel: grpc.Channel, address: str, timeout: float):
        self.channel = channel
        self.address = address
        self.timeout = timeout

    def info(self) -> common_pb2.GetInfoResponse:
        """What the server says of itself."""
        return common_pb2_grpc.InfoServiceStub(self.channel).GetInfo(common_pb2.GetInfoRequest(), timeout=self.timeout)


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """The server under test."""
    config = request.config
    address = config.getoption("--target")
    with open_sync_channel(address, token=config.getoption("--target-token")) as channel:
        timeout = config.getoption("--target-timeout")
        grpc.channel_ready_future(channel).result(timeout=timeout)
        yield Target(channel, address, timeout)


@pytest.fixture
def run_id() -> str:
    """A run that no other test uses."""
    return f"conformance-{uuid.uuid4().hex[:12]}"
