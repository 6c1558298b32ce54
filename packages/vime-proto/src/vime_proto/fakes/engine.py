"""An in-memory engine: RolloutService and EngineControlService over the toy model."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.engine_state import EngineMachine, state_name
from vime_proto.errors import StatusError
from vime_proto.fakes import _toy_model as toy
from vime_proto.fakes import build
from vime_proto.fakes._control import ControlMixin
from vime_proto.fakes._generations import Generations, top_logprobs
from vime_proto.idempotency import RequestLog
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.tensor import to_numpy
from vime_proto.validate import validate_generate_request, validate_score_request
from vime_proto.version import policy_version, satisfies, show


class FakeEngine(ControlMixin, rollout_pb2_grpc.RolloutServiceServicer, rollout_pb2_grpc.EngineControlServiceServicer):
    """One engine that starts SERVING.

    Args:
        engine_id: its name.
        version: weights it starts with; number 0 of run "run" unless stated.
        seed: of the first weights.
        step_seconds: how long each token takes.
        route_capture: whether it can return routes.
    """

    def __init__(
        self,
        engine_id: str = "engine-0",
        version: common.PolicyVersion | None = None,
        seed: int = 0,
        step_seconds: float = 0.002,
        route_capture: bool = True,
    ):
        self.engine_id = engine_id
        self.model = toy.ToyModel(seed)
        self.machine = EngineMachine()
        self.last_version = version or policy_version("run", 0, 0)
        self.machine.started(self.last_version)
        self.step_seconds = step_seconds
        self.route_capture = route_capture
        self.capabilities = {"route_capture": "true"} if route_capture else {}
        self.busy = 0
        self.frozen = False
        self.state_changed = asyncio.Condition()
        self.generations = Generations(self)
        self.log = RequestLog()
        self.control = asyncio.Lock()
        self.transports = {}
        self.update = None
        self.update_transport = None
        self.watch: asyncio.Task | None = None

    async def stop(self) -> None:
        """Ends what runs."""
        for one in self.generations.open:
            one.task.cancel()
        if self.watch is not None:
            self.watch.cancel()

    def unavailable(self) -> StatusError:
        """The answer in states that take no requests."""
        reason = f": {self.machine.reason}" if self.machine.reason else ""
        message = f"engine {self.engine_id!r} is {state_name(self.machine.state)}{reason}"
        return StatusError(grpc.StatusCode.UNAVAILABLE, message, retry_after=0.1)

    def check_minimum(self, request: pb.GenerateRequest) -> None:
        """Refuses a request that needs newer weights."""
        if not request.HasField("minimum_version"):
            return
        have = self.machine.version
        if have is None or not satisfies(have, request.minimum_version):
            shown = show(have) if have is not None else "no version"
            raise StatusError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"minimum_version: request {request.request_id!r} needs {show(request.minimum_version)}, "
                f"engine {self.engine_id!r} holds {shown}",
            )

    def _check_routing(self, wanted: bool) -> None:
        if wanted and not self.route_capture:
            raise StatusError(
                grpc.StatusCode.FAILED_PRECONDITION, f"return_routing: engine {self.engine_id!r} captures no routes"
            )

    async def Generate(self, request, context):
        validate_generate_request(request, toy.VOCAB, toy.MAX_MODEL_LEN)
        if request.sampling.stop:
            message = "stop strings need a tokenizer, which this engine has not; use stop_token_ids"
            raise StatusError(grpc.StatusCode.INVALID_ARGUMENT, message, [("sampling.stop", message)])
        self._check_routing(request.return_routing)
        async for message in self.generations.read(request):
            yield message

    async def Score(self, request, context):
        validate_score_request(request, toy.VOCAB, toy.MAX_MODEL_LEN)
        self._check_routing(request.return_routing)
        await self.generations.admit()
        tokens = to_numpy(request.token_ids)
        start = request.start if request.HasField("start") else 1
        logprobs = toy.log_softmax(self.model.logits(tokens)[start - 1 : -1] / request.temperature)
        chosen = np.take_along_axis(logprobs, tokens[start:, None], axis=-1)[:, 0]
        response = pb.ScoreResponse(
            logprobs=build.floats(chosen), version=self.machine.version, engine_id=self.engine_id
        )
        if request.top_logprobs:
            response.top_logprobs.CopyFrom(top_logprobs(logprobs, request.top_logprobs))
        if request.return_routing:
            response.routing.CopyFrom(build.trace(self.model.routes(tokens[:-1]), self.machine.version, toy.EXPERTS))
        return response

    async def Abort(self, request, context):
        return pb.AbortResponse(aborted=await self.abort_requests(set(request.request_ids)))

    async def abort_requests(self, wanted: set[str] | None = None, admitted_only: bool = False) -> list[str]:
        """Ends requests with what they have; all of them when `wanted` is empty. Answers their ids."""
        chosen = [
            one
            for one in self.generations.open
            if (not wanted or one.request.request_id in wanted) and (one.stepping or not admitted_only)
        ]
        for one in chosen:
            one.abort = True
        async with self.state_changed:
            self.state_changed.notify_all()
        return [one.request.request_id for one in chosen]

    async def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(
            model="toy",
            architecture="ToyForCausalLM",
            vocab_size=toy.VOCAB,
            max_model_len=toy.MAX_MODEL_LEN,
            eos_token_ids=[toy.EOS],
            experts=toy.EXPERTS,
            top_k_experts=toy.TOP_K,
            moe_layer_ids=toy.MOE_LAYERS,
            version=self.machine.version,
            model_digest=toy.DIGEST,
            dtype=common.DTYPE_FLOAT32,
        )
