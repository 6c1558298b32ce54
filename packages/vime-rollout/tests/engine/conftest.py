"""Real engines on tiny models: one process a model for all tests."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import models
import numpy as np
import pytest
import replaying
from pushing import TIMEOUT, Pusher, new_id

from vime_proto import fakes
from vime_proto.channel import open_sync_channel
from vime_proto.common.v1 import common_pb2_grpc
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.sample.v1 import sample_pb2 as sample
from vime_proto.tensor import to_numpy, to_tensor
from vime_proto.version import policy_version

RUN = "test-run"
# A busy machine needs several times the half minute that a quiet one takes.
START_SECONDS = 400


class EngineProcess:
    """An engine in a process of its own, and stubs that talk to it."""

    def __init__(self, folder: Path, root: Path, *arguments: str, wait: bool = True):
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.address_file = root / "address"
        self.log = root / "log"
        self.log_file = self.log.open("w")
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "vime_rollout", "engine", "--model", str(folder), "--run-id", RUN,
                "--address-file", str(self.address_file), "--exit-with-parent", "--file-root", str(root / "files"),
                "--shm-root", str(root / "shm"), "--kv-cache-gib", "0.25", *arguments,
            ],
            stdout=self.log_file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._numbers = itertools.count(1)
        if wait:
            self.connect()

    def connect(self) -> None:
        """Waits until the engine serves."""
        deadline = time.monotonic() + START_SECONDS
        while not self.address_file.exists():
            self._check(deadline)
        self.address = self.address_file.read_text()
        self.channel = open_sync_channel(self.address)
        self.rollout = rollout_pb2_grpc.RolloutServiceStub(self.channel)
        self.control = rollout_pb2_grpc.EngineControlServiceStub(self.channel)
        self.info = common_pb2_grpc.InfoServiceStub(self.channel)
        while self.status().state == pb.ENGINE_STATE_STARTING:
            self._check(deadline)
        self.model = self.rollout.GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT)

    def _check(self, deadline: float) -> None:
        if self.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the engine did not start:\n{self.log.read_text()[-3000:]}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.1)

    def stop(self) -> int:
        """Ends it; its exit status."""
        self.process.terminate()
        return self.process.wait(60)

    def status(self) -> pb.EngineStatus:
        """GetStatus."""
        return self.control.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT).status

    def pusher(self, kind: str = "shm") -> Pusher:
        """A sender; files go where the engine looks."""
        folder = self.root / ("files" if kind == "file" else "shm")
        folder.mkdir(exist_ok=True)
        return Pusher(self.control, kind, None if kind == "stream" else folder)

    def next_version(self):
        """A version that no test pushed yet."""
        return policy_version(RUN, 0, next(self._numbers))

    def skip_versions_below(self, number: int) -> None:
        """Another sender used versions up to this one."""
        self._numbers = itertools.count(max(number, next(self._numbers)) + 1)

    def stream(self, prompt, new_tokens: int = 8, request_id: str | None = None, timeout: float = TIMEOUT, **more):
        """The call of Generate; keyword arguments of SamplingParams or GenerateRequest."""
        names = set(sample.SamplingParams.DESCRIPTOR.fields_by_name)
        params = {key: value for key, value in more.items() if key in names}
        rest = {key: value for key, value in more.items() if key not in names}
        params.setdefault("temperature", 0.0)
        request = pb.GenerateRequest(
            request_id=request_id or new_id(),
            prompt_token_ids=to_tensor(np.array(prompt, dtype=np.int32)),
            sampling=sample.SamplingParams(max_new_tokens=new_tokens, **params),
            **rest,
        )
        return self.rollout.Generate(request, timeout=timeout)

    def generate(self, prompt, new_tokens: int = 8, **more) -> Answer:
        """A whole answer."""
        return Answer(list(self.stream(prompt, new_tokens, **more)))


class Answer:
    """The messages of one answer, put together."""

    def __init__(self, messages):
        self.messages = messages
        self.last = messages[-1]
        join = lambda field: np.concatenate(  # noqa: E731
            [to_numpy(getattr(one, field)) for one in messages if one.HasField(field)] or [np.zeros(0)]
        )
        self.tokens = join("token_ids").astype(int).tolist()
        self.logprobs = join("logprobs")
        self.finish = sample.FinishReason.Name(self.last.finish_reason).removeprefix("FINISH_REASON_")
        self.versions = [one.version.number for one in messages]
        self.token_versions = [
            one.version.number for one in messages for _ in range(one.token_ids.shape[0] if one.token_ids.shape else 0)
        ]


def _root(name: str) -> Path:
    # Memory-backed, so that the shm transport is what it says.
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    return Path(tempfile.mkdtemp(prefix=f"vime-test-{name}-", dir=base))


@contextlib.contextmanager
def running(name: str, cfg: dict, seed: int, *arguments: str, wait: bool = True):
    """An engine on a model made for it. One that still runs at the end must stop cleanly, within seconds."""
    root = _root(name)
    try:
        tensors = models.weights(cfg, seed)
        folder = models.save(root / "model", cfg, tensors)
        process = EngineProcess(folder, root / "run", *arguments, wait=wait)
        process.folder, process.config, process.tensors = folder, cfg, tensors
        try:
            yield process
            if process.process.poll() is None:
                began = time.monotonic()
                assert process.stop() == 0 and time.monotonic() - began < 20
        finally:
            process.process.kill()
            process.log_file.close()
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)


@pytest.fixture(scope="session")
def moe():
    """An engine with a mixture of experts (layer 0 dense, layer 1 sparse) and route capture."""
    with running("moe", models.config(moe=True), 1, "--route-capture", "--message-tokens", "8") as process:
        yield process


@pytest.fixture(scope="session")
def tied():
    """An engine with a dense model whose head is its embedding."""
    with running("tied", models.config(tied=True), 2, "--engine-id", "tied-engine") as process:
        yield process


@pytest.fixture(scope="session")
def trainer():
    """The trainer, in its own environment."""
    process = replaying.Trainer()
    yield process
    process.close()


@pytest.fixture(autouse=True)
def _leave_it_serving(request):
    """Every test leaves its engine serving, whatever it did."""
    yield
    for name in ("moe", "tied"):
        if name in request.fixturenames:
            engine = request.getfixturevalue(name)
            assert engine.status().state == pb.ENGINE_STATE_SERVING


@pytest.fixture
def certificate(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates with openssl")
    return fakes.certificate(tmp_path / "tls")
