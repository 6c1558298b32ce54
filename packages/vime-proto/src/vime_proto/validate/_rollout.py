"""Messages of RolloutService and EngineControlService."""

from __future__ import annotations

import math
from collections.abc import Mapping

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.sample.v1 import sample_pb2 as sample
from vime_proto.tensor import to_numpy
from vime_proto.validate import _fields as fields
from vime_proto.validate._routing import validate_trace
from vime_proto.validate._sample import validate_ragged, validate_top_logprobs
from vime_proto.validate._sampling import validate_sampling
from vime_proto.version import check_version


def validate_generate_request(
    request: pb.GenerateRequest,
    vocab_size: int | None = None,
    max_model_len: int | None = None,
    evaluation: bool = True,
) -> None:
    """Checks a generation request.

    Args:
        request: the message.
        vocab_size: prompt ids must be below it; None skips that.
        max_model_len: prompt plus one new token must fit; None skips that.
        evaluation: whether temperature 0 is allowed; an engine cannot tell and allows it.

    Raises:
        ContractError: names the field and the request.
    """
    fields.text(request.request_id, "request_id")
    about = f" (request {request.request_id!r})"
    if not request.HasField("prompt_token_ids"):
        raise ContractError("prompt_token_ids", f"must be set{about}")
    prompt = fields.token_ids(request.prompt_token_ids, "prompt_token_ids", about, 1, vocab_size)
    if max_model_len is not None and len(prompt) >= max_model_len:
        raise ContractError(
            "prompt_token_ids", f"{len(prompt)} tokens leave no room below the limit of {max_model_len}{about}"
        )
    if not request.HasField("sampling"):
        raise ContractError("sampling", f"must be set; max_new_tokens is required{about}")
    validate_sampling(request.sampling, "sampling", evaluation=evaluation)
    if request.logprob_mode not in sample.LogprobMode.values():
        raise ContractError("logprob_mode", f"unknown value {request.logprob_mode}{about}")
    if request.routing_start_row > len(prompt):
        raise ContractError(
            "routing_start_row", f"{request.routing_start_row} is beyond the prompt of {len(prompt)}{about}"
        )
    if request.HasField("minimum_version"):
        check_version(request.minimum_version, "minimum_version")


def validate_generate_response(response: pb.GenerateResponse, top_logprobs: int = 0) -> None:
    """Checks one delta of an answer: as many finite log-probs as tokens, a version, the last message's fields only there.

    Raises:
        ContractError: names the field and the request.
    """
    about = f" (request {response.request_id!r})"
    length = 0
    if response.HasField("token_ids"):
        length = len(fields.token_ids(response.token_ids, "token_ids", about))
    if length or response.HasField("logprobs"):
        fields.logprobs(response.logprobs, "logprobs", about, length)
    fields.version(response, "version", "version", about)
    if top_logprobs and length:
        validate_top_logprobs(response.top_logprobs, length, count=top_logprobs)
    if response.HasField("kept_token_ids"):
        validate_ragged(response.kept_token_ids, length, "kept_token_ids")
    if not response.finish_reason:
        for name in ("stop_token_id", "stop_included", "routing"):
            if response.HasField(name):
                raise ContractError(name, f"belongs to the last message only{about}")
    elif response.HasField("routing"):
        validate_trace(response.routing, "routing")


def validate_score_request(
    request: pb.ScoreRequest, vocab_size: int | None = None, max_model_len: int | None = None
) -> None:
    """Checks a scoring request; the temperature must be stated.

    Raises:
        ContractError: names the field and the request.
    """
    fields.text(request.request_id, "request_id")
    about = f" (request {request.request_id!r})"
    ids = fields.token_ids(request.token_ids, "token_ids", about, 2, vocab_size)
    if max_model_len is not None and len(ids) > max_model_len:
        raise ContractError("token_ids", f"{len(ids)} tokens are more than the limit of {max_model_len}{about}")
    if request.HasField("start") and not 1 <= request.start < len(ids):
        raise ContractError("start", f"must be in [1, {len(ids)}), got {request.start}{about}")
    temperature = fields.present(request, "temperature", why=f"must be set, above 0{about}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ContractError("temperature", f"must be above 0, got {temperature}{about}")


def validate_score_response(response: pb.ScoreResponse, request: pb.ScoreRequest) -> None:
    """Checks an answer against its request.

    Raises:
        ContractError: names the field and the request.
    """
    about = f" (request {request.request_id!r})"
    length = int(request.token_ids.shape[0]) - (request.start if request.HasField("start") else 1)
    fields.logprobs(response.logprobs, "logprobs", about, length)
    fields.version(response, "version", "version", about)
    if request.top_logprobs:
        validate_top_logprobs(response.top_logprobs, length, count=request.top_logprobs)
    if response.HasField("routing"):
        validate_trace(response.routing, "routing", tokens=int(request.token_ids.shape[0]))


def validate_in_flight(request: pb.PauseRequest | pb.SleepRequest | pb.BeginUpdateRequest) -> int:
    """The policy for requests in flight (ABORT when unspecified); WAIT needs wait_seconds.

    Raises:
        ContractError: an unknown policy, or WAIT without wait_seconds.
    """
    if request.in_flight not in pb.InFlightPolicy.values():
        raise ContractError("in_flight", f"unknown value {request.in_flight}; valid: ABORT, KEEP, WAIT")
    if request.in_flight == pb.IN_FLIGHT_POLICY_WAIT:
        fields.present(request, "wait_seconds", why="must be set for WAIT, in seconds")
        fields.wait_seconds(request)
    return request.in_flight or pb.IN_FLIGHT_POLICY_ABORT


def check_streams(streams: Mapping[str, common.Tensor], length: int, field: str = "streams") -> None:
    """Checks that every named per-token stream has `length` rows.

    Raises:
        ContractError: names the stream.
    """
    for key, value in streams.items():
        array = to_numpy(value, f"{field}[{key!r}]")
        if not array.ndim or array.shape[0] != length:
            raise ContractError(f"{field}[{key!r}].shape", f"must start with {length}, got {list(array.shape)}")
