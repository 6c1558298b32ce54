"""Log-probabilities of given tokens."""

from __future__ import annotations

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
    # Scores are large and computed again in no time: a repetition does that instead of reading a copy.
    engine.registry.forget(generation)
    if generation.prompt_logprobs is None:
        message = f"the engine ended the request before it was scored {about}"
        raise StatusError(grpc.StatusCode.UNAVAILABLE, message, retry_after=0.1)
    start = request.start if request.HasField("start") else 1
    ids, values = (table[start - 1 :] for table in generation.prompt_logprobs)
    if scaled:
        ids, values = _at_temperature(ids, values, request.temperature)
    if not np.isfinite(values[:, 0]).all():
        bad = int(np.flatnonzero(~np.isfinite(values[:, 0]))[0])
        engine.poisoned = True
        raise NotFiniteError(
            f"the log-probability of token {start + bad} is {values[bad, 0]}: the weights or the KV cache are not finite {about}"
        )
    response = pb.ScoreResponse(
        logprobs=to_tensor(values[:, 0].astype(np.float32)),
        version=generation.last_version,
        engine_id=engine.settings.engine_id,
    )
    if request.top_logprobs:
        wanted = slice(1, 1 + request.top_logprobs)
        response.top_logprobs.token_ids.CopyFrom(to_tensor(ids[:, wanted]))
        response.top_logprobs.logprobs.CopyFrom(to_tensor(values[:, wanted].astype(np.float32)))
    if request.return_routing:
        response.routing.CopyFrom(_routes.trace(generation, model, generated=0))
    return response


def top_message(positions: Sequence[Sequence[tuple[int, float]]], count: int) -> sample.TopLogprobs:
    """Alternatives of n positions, the ``count`` most likely each: [n, count]."""
    ids = np.array([[token for token, _ in one[:count]] for one in positions], dtype=np.int32)
    values = np.array([[value for _, value in one[:count]] for one in positions], dtype=np.float32)
    shape = (len(positions), count)
    return sample.TopLogprobs(token_ids=to_tensor(ids.reshape(shape)), logprobs=to_tensor(values.reshape(shape)))


def _at_temperature(ids: np.ndarray, values: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Tables [n, 1 + vocabulary] of temperature 1 at another one: the token itself, then the vocabulary, most likely first."""
    values = values / temperature
    top = values[:, 1:].max(axis=1, keepdims=True)
    values -= top + np.log(np.exp(values[:, 1:] - top).sum(axis=1, keepdims=True))
    order = np.argsort(-values[:, 1:], axis=1, kind="stable") + 1
    order = np.concatenate([np.zeros((len(order), 1), dtype=order.dtype), order], axis=1)
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)
