"""The client that the router's tests share; each test starts and leaves the router without engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.conformance._calls import new_id
from vime_proto.conformance._engines import EngineHost
from vime_proto.conformance._rollout_client import Answer, call_metadata
from vime_proto.fakes import build
from vime_proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from vime_proto.router.v1 import router_pb2 as pb
from vime_proto.router.v1 import router_pb2_grpc
from vime_proto.version import policy_version


class RouterClient:
    """Calls RouterService and RolloutService of the router under test, and owns its engines."""

    def __init__(self, target, host: EngineHost):
        self.router = router_pb2_grpc.RouterServiceStub(target.channel)
        self.rollout = rollout_pb2_grpc.RolloutServiceStub(target.channel)
        self.timeout = target.timeout
        self.host = host
        self.run = new_id("run")

    def call(self, method: str, request, **fields):
        message = request(**fields)
        if "request_id" in message.DESCRIPTOR.fields_by_name and not message.request_id:
            message.request_id = new_id()
        return getattr(self.router, method)(message, timeout=self.timeout)

    def version(self, number: int, lineage: int = 0) -> common.PolicyVersion:
        return policy_version(self.run, lineage, number)

    def register(self, engine_id: str, address: str, **fields) -> pb.EngineEntry:
        return self.call(
            "RegisterEngine", pb.RegisterEngineRequest, engine_id=engine_id, address=address, **fields
        ).engine

    def add(self, number: int = 0, step_seconds: float = 0.002, **fields) -> str:
        """A new engine, registered and usable; answers its id."""
        engine_id = new_id("engine")
        address = self.host.start(engine_id, self.version(number), step_seconds)
        self.register(engine_id, address, **fields)
        self.wait(lambda: self.entry(engine_id).health in (pb.ENGINE_HEALTH_HEALTHY, pb.ENGINE_HEALTH_INELIGIBLE))
        return engine_id

    def list(self, **fields) -> pb.ListEnginesResponse:
        return self.call("ListEngines", pb.ListEnginesRequest, **{"refresh": True, **fields})

    def entry(self, engine_id: str) -> pb.EngineEntry:
        found = [entry for entry in self.list().engines if entry.engine_id == engine_id]
        assert found, f"{engine_id} is not listed"
        return found[0]

    def wait(self, condition: Callable[[], bool], seconds: float = 10) -> None:
        """Until the condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "did not come within the time"
            time.sleep(0.05)

    def request(self, tokens: int = 3, **fields) -> rollout_pb2.GenerateRequest:
        return rollout_pb2.GenerateRequest(
            request_id=new_id("generate"),
            prompt_token_ids=build.ids([3, 4, 5]),
            sampling=build.sampling(max_new_tokens=tokens, ignore_eos=True),
            **fields,
        )

    def start(self, request: rollout_pb2.GenerateRequest, timeout: float | None = None):
        return self.rollout.Generate(request, timeout=timeout or self.timeout, metadata=call_metadata(request))

    def generate(self, request: rollout_pb2.GenerateRequest | None = None) -> Answer:
        request = request if request is not None else self.request()
        answer = Answer(list(self.start(request)))
        answer.check(request)
        return answer

    def minimum(self, version: common.PolicyVersion | None) -> None:
        self.call("SetMinimumVersion", pb.SetMinimumVersionRequest, version=version)

    def drain(self, engine_id: str, **fields) -> pb.EngineEntry:
        return self.call("DrainEngine", pb.DrainEngineRequest, engine_id=engine_id, **fields).engine

    def deregister(self, engine_id: str) -> None:
        self.call("DeregisterEngine", pb.DeregisterEngineRequest, engine_id=engine_id)

    def clear(self) -> None:
        """No engines, no minimum version."""
        self.minimum(None)
        for entry in self.list(refresh=False).engines:
            self.deregister(entry.engine_id)


@pytest.fixture
def router(target) -> Iterator[RouterClient]:
    """A client; the router has no engines before and after."""
    host = EngineHost()
    client = RouterClient(target, host)
    client.clear()
    yield client
    client.clear()
    host.close()
