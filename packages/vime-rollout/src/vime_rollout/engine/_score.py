"""Log-probabilities of given tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import grpc
import numpy as np

from vime_proto.errors import StatusError
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.sample.v1 import sample_pb2 as sample
from vime_proto.tensor import to_numpy, to_tensor
from vime_proto.validate import validate_score_request
from vime_rollout.engine import _routes
from vime_rollout.engine._types import NotFiniteError, Sampling

# Numbers that a whole-vocabulary answer may hold: it is built in Python lists.
_MOST_NUMBERS = 4_000_000


async def score(engine, request: pb.ScoreRequest, context) -> pb.ScoreResponse:
    """Answers a ScoreRequest.

    vLLM gives prompt log-probs at temperature 1. At another temperature all of a position's are needed: they are the logits but
    for a constant, so dividing them and normalising again is exact.
    """
    model = engine.model
    # One token is generated along, and must fit.
    validate_score_request(request, model.vocab_size, model.max_model_len - 1)
    about = f"(request {request.request_id!r})"
    if request.return_routing and engine.capabilities.get("route_capture") != "true":
        raise StatusError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"return_routing: engine {engine.settings.engine_id!r} does not capture routes {about}",
        )
    tokens = to_numpy(request.token_ids)
    scaled = request.temperature != 1.0
    if scaled and len(tokens) * model.vocab_size > _MOST_NUMBERS:
        raise StatusError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"temperature: at another than 1 this engine scores at most {_MOST_NUMBERS // model.vocab_size} tokens {about}",
        )
    sampling = Sampling(
        max_new_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=-1 if scaled else request.top_logprobs
    )
    generation = await engine.generation(
        request.request_id, request.SerializeToString(deterministic=True), tokens.tolist(), sampling
    )
    generation.readers += 1
    context.add_done_callback(lambda _: engine.spawn(engine.release(generation)))
    async for _ in generation.parts():
        pass
    if generation.prompt_logprobs is None:
        raise StatusError(grpc.StatusCode.ABORTED, f"the engine ended the request before it was scored {about}")
    start = request.start if request.HasField("start") else 1
    positions = generation.prompt_logprobs[start - 1 :]
    if scaled:
        positions = [_at_temperature(one, request.temperature) for one in positions]
    values = np.array([one[0][1] for one in positions], dtype=np.float32)
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        engine.poisoned = True
        raise NotFiniteError(
            f"the log-probability of token {start + bad} is {values[bad]}: the weights are not finite {about}",
        )
    response = pb.ScoreResponse(
        logprobs=to_tensor(values), version=generation.last_version, engine_id=engine.settings.engine_id
    )
    if request.top_logprobs:
        response.top_logprobs.CopyFrom(top_message([one[1:] for one in positions], request.top_logprobs))
    if request.return_routing:
        response.routing.CopyFrom(_routes.trace(generation, model, generated=0))
    return response


def top_message(positions: Sequence[Sequence[tuple[int, float]]], count: int) -> sample.TopLogprobs:
    """Alternatives of n positions, the ``count`` most likely each: [n, count]."""
    ids = np.array([[token for token, _ in one[:count]] for one in positions], dtype=np.int32)
    values = np.array([[value for _, value in one[:count]] for one in positions], dtype=np.float32)
    shape = (len(positions), count)
    return sample.TopLogprobs(token_ids=to_tensor(ids.reshape(shape)), logprobs=to_tensor(values.reshape(shape)))


def _at_temperature(position: Sequence[tuple[int, float]], temperature: float) -> list[tuple[int, float]]:
    """One position's whole vocabulary, its own token first and again in its place, at a temperature."""
    values = np.array([value for _, value in position], dtype=np.float64) / temperature
    everything = values[1:]
    top = float(everything.max())
    total = top + math.log(float(np.exp(everything - top).sum()))
    order = np.argsort(-everything, kind="stable")
    rest = [(position[1 + index][0], float(everything[index] - total)) for index in order]
    return [(position[0][0], float(values[0] - total)), *rest]
