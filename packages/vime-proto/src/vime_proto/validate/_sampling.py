"""Sampling parameters."""

from __future__ import annotations

import math

from vime_proto.errors import ContractError
from vime_proto.sample.v1 import sample_pb2 as sample
from vime_proto.validate import _fields as fields


def validate_sampling(
    params: sample.SamplingParams, field: str = "sampling", evaluation: bool = False, override: bool = False
) -> None:
    """Checks sampling parameters.

    Args:
        params: the message.
        field: how errors name it.
        evaluation: whether temperature 0 (greedy) is allowed.
        override: whether it only overrides others field by field, so that max_new_tokens may be absent.

    Raises:
        ContractError: a value outside its range, or max_new_tokens missing.
    """
    if params.HasField("temperature"):
        _temperature(params.temperature, f"{field}.temperature", evaluation)
    if params.HasField("top_p") and not 0 < params.top_p <= 1:
        raise ContractError(f"{field}.top_p", f"must be in (0, 1], got {params.top_p}")
    if params.HasField("min_p") and not 0 <= params.min_p <= 1:
        raise ContractError(f"{field}.min_p", f"must be in [0, 1], got {params.min_p}")
    if params.HasField("max_new_tokens"):
        fields.at_least(params.max_new_tokens, 1, f"{field}.max_new_tokens")
        if params.min_new_tokens > params.max_new_tokens:
            raise ContractError(
                f"{field}.min_new_tokens", f"{params.min_new_tokens} is above max_new_tokens {params.max_new_tokens}"
            )
    elif not override:
        raise ContractError(f"{field}.max_new_tokens", "must be set, at least 1")
    for index, token in enumerate(params.stop_token_ids):
        fields.at_least(token, 0, f"{field}.stop_token_ids[{index}]")
    for index, stop in enumerate(params.stop):
        fields.text(stop, f"{field}.stop[{index}]")
    if params.HasField("repetition_penalty") and not (
        math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0
    ):
        raise ContractError(f"{field}.repetition_penalty", f"must be above 0, got {params.repetition_penalty}")
    for name in ("frequency_penalty", "presence_penalty"):
        fields.finite(getattr(params, name), f"{field}.{name}")


def _temperature(value: float, field: str, evaluation: bool) -> None:
    if not math.isfinite(value) or value < 0:
        raise ContractError(field, f"must be a number above 0, got {value}")
    if value == 0 and not evaluation:
        raise ContractError(field, "must be above 0; greedy sampling (0) is for evaluation only")


def truncates(params: sample.SamplingParams) -> bool:
    """Whether top-p, top-k or min-p cuts the distribution, so that training needs the kept set."""
    return (params.HasField("top_p") and params.top_p < 1) or params.top_k > 0 or params.min_p > 0
