from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from client import Client
from hypothesis import HealthCheck, settings

from vime_buffer import BufferServer, BufferSettings
from vime_proto.errors import from_rpc_error

# Property tests are indifferent to how busy the machine is.
settings.register_profile("vime", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vime")


class Clock:
    """Seconds that tests move."""

    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def start(tmp_path, clock):
    """Starts servers in this process on one store; `async with start(**settings) as client`."""

    @contextlib.asynccontextmanager
    async def run(**settings):
        settings.setdefault("database", str(tmp_path / "buffer.db"))
        server = await BufferServer.start(BufferSettings(**settings), clock)
        client = await Client.connect(server.address)
        client.server = server
        try:
            yield client
        finally:
            await client.close()
            await server.stop(0)

    return run


@pytest.fixture
async def client(start):
    """A buffer without a prompt source."""
    async with start() as client:
        yield client


@pytest.fixture
def jsonl(tmp_path):
    """Writes rows to a file and names it."""

    def write(name: str, rows) -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


class Process:
    """`vime-buffer serve` as a process of its own."""

    def __init__(self, folder: Path, *arguments: str):
        self.address_file = folder / "address"
        self.address_file.unlink(missing_ok=True)
        self.child = subprocess.Popen(
            [
                *(sys.executable, "-m", "vime_buffer", "serve", "--database", str(folder / "buffer.db")),
                *("--address-file", str(self.address_file), "--exit-with-parent", *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self.child.stdout.readline()
        if not line.startswith("listening on "):
            raise RuntimeError(f"no start: {line!r} {self.child.stderr.read()}")
        self.address = line.split()[-1]

    def kill(self) -> None:
        os.kill(self.child.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.terminate()
        self.child.wait(30)
        self.child.stdout.close()
        self.child.stderr.close()


@pytest.fixture
def process(tmp_path):
    """Starts buffer processes on one store, one after the other."""
    started = []

    def run(*arguments: str) -> Process:
        started.append(Process(tmp_path, *arguments))
        return started[-1]

    yield run
    for one in started:
        one.close()


@contextlib.contextmanager
def _refused(code: grpc.StatusCode, *texts: str):
    with pytest.raises(grpc.RpcError) as caught:
        yield caught
    status = from_rpc_error(caught.value)
    assert status.code is code, status
    for text in texts:
        assert text in f"{status.message} {status.violations}", status


@pytest.fixture
def refused():
    """`with refused(StatusCode, *texts)`: the call fails with this code, and its message holds the texts."""
    return _refused
