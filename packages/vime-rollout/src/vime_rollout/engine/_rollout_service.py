"""``RolloutService`` of the engine."""

from __future__ import annotations

import grpc
import numpy as np

from vime_proto.errors import ContractError, StatusError
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.sample.v1 import sample_pb2 as sample
from vime_proto.tensor import to_numpy, to_tensor
from vime_proto.validate import truncates, validate_generate_request
from vime_rollout.engine import _routes, _score
from vime_rollout.engine._engine import Engine
from vime_rollout.engine._generation import Generation
from vime_rollout.engine._types import Sampling

_FINISH = {
    "stop": sample.FINISH_REASON_STOP,
    "length": sample.FINISH_REASON_LENGTH,
    "abort": sample.FINISH_REASON_ABORT,
}


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Generation and scoring."""

    def __init__(self, engine: Engine):
        self._engine = engine

    async def Generate(self, request, context):
        engine = self._engine
        validate_generate_request(request, engine.model.vocab_size, engine.model.max_model_len)
        sampling = sampling_of(request, engine)
        generation = await engine.generation(
            request.request_id,
            request.SerializeToString(deterministic=True),
            to_numpy(request.prompt_token_ids).tolist(),
            sampling,
            request.minimum_version if request.HasField("minimum_version") else None,
            request.priority,
        )
        generation.readers += 1
        context.add_done_callback(lambda _: engine.spawn(engine.release(generation)))
        first = True
        async for start, stop, version, last in generation.parts():
            message = self._message(request, generation, start, stop, last)
            message.version.CopyFrom(version)
            if first and generation.cached_tokens is not None:
                message.cached_tokens = generation.cached_tokens
            first = False
            yield message

    def _message(self, request, generation: Generation, start: int, stop: int, last: bool) -> pb.GenerateResponse:
        engine = self._engine
        message = pb.GenerateResponse(request_id=request.request_id, engine_id=engine.settings.engine_id)
        if stop > start:
            message.token_ids.CopyFrom(to_tensor(np.array(generation.tokens[start:stop], dtype=np.int32)))
            message.logprobs.CopyFrom(to_tensor(np.array(generation.logprobs[start:stop], dtype=np.float32)))
            if request.top_logprobs:
                message.top_logprobs.CopyFrom(_score.top_message(generation.top[start:stop], request.top_logprobs))
        if last:
            message.finish_reason = _FINISH[generation.finish]
            if generation.finish == "stop":
                # Only token ids stop an engine without a tokenizer, and what was sampled is returned.
                message.stop_included = True
                message.stop_token_id = (
                    generation.tokens[-1] if generation.stop_token is None else generation.stop_token
                )
            if request.return_routing:
                message.routing.CopyFrom(_routes.trace(generation, engine.model, request.routing_start_row))
        return message

    async def Score(self, request, context):
        return await _score.score(self._engine, request, context)

    async def Abort(self, request, context):
        registry = self._engine.registry
        if request.request_ids:
            found = [registry.get(one) for one in dict.fromkeys(request.request_ids)]
            wanted = [one for one in found if one is not None]
        else:
            wanted = registry.running
        return pb.AbortResponse(aborted=await self._engine.end_requests(wanted))

    async def GetModelInfo(self, request, context):
        model = self._engine.model
        return pb.GetModelInfoResponse(
            model=str(model.folder),
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            experts=model.experts,
            top_k_experts=model.top_k,
            moe_layer_ids=model.moe_layer_ids,
            version=self._engine.machine.version,
            model_digest=model.digest,
            dtype=model.dtype,
        )


def sampling_of(request: pb.GenerateRequest, engine: Engine) -> Sampling:
    """The sampling of a request, every value explicit.

    Raises:
        ContractError: stop strings (the engine has no tokenizer), ids beyond the vocabulary, or alternatives beyond it.
        StatusError: FAILED_PRECONDITION, for raw log-probs that differ from processed ones, or routes without capture.
    """
    given, model = request.sampling, engine.model
    about = f"(request {request.request_id!r})"
    if given.stop:
        raise ContractError("sampling.stop", f"this engine has no tokenizer and takes stop_token_ids only {about}")
    for index, token in enumerate(given.stop_token_ids):
        if token >= model.vocab_size:
            raise ContractError(f"sampling.stop_token_ids[{index}]", f"{token} is not below {model.vocab_size} {about}")
    if request.top_logprobs > model.vocab_size:
        raise ContractError(
            "top_logprobs", f"{request.top_logprobs} is above the vocabulary of {model.vocab_size} {about}"
        )
    if request.return_routing and engine.capabilities.get("route_capture") != "true":
        raise StatusError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"return_routing: engine {engine.settings.engine_id!r} does not capture routes; start it with route_capture {about}",
        )
    value = lambda name, default: getattr(given, name) if given.HasField(name) else default  # noqa: E731
    temperature = value("temperature", 1.0)
    penalties = (value("repetition_penalty", 1.0), value("frequency_penalty", 0.0), value("presence_penalty", 0.0))
    if request.logprob_mode == sample.LOGPROB_MODE_RAW and (
        temperature not in (0.0, 1.0) or truncates(given) or penalties != (1.0, 0.0, 0.0)
    ):
        raise StatusError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"logprob_mode: this engine answers PROCESSED log-probs, which are RAW only at temperature 1 without truncation "
            f"and penalties {about}",
        )
    eos = () if given.ignore_eos else model.eos_token_ids
    room = model.max_model_len - request.prompt_token_ids.shape[0]
    return Sampling(
        max_new_tokens=min(given.max_new_tokens, room),
        min_new_tokens=min(value("min_new_tokens", 0), room),
        temperature=temperature,
        top_p=value("top_p", 1.0),
        top_k=value("top_k", 0),
        min_p=value("min_p", 0.0),
        stop_token_ids=tuple(dict.fromkeys([*given.stop_token_ids, *eos])),
        ignore_eos=value("ignore_eos", False),
        seed=given.seed if given.HasField("seed") else None,
        repetition_penalty=penalties[0],
        frequency_penalty=penalties[1],
        presence_penalty=penalties[2],
        top_logprobs=request.top_logprobs,
    )
