"""Sampling parameters of a request: layers laid over one another field by field, and a seed of its own."""

from __future__ import annotations

import hashlib

from vime_proto.errors import ContractError
from vime_proto.sample.v1 import sample_pb2 as pb

_LISTS = ("stop_token_ids", "stop")


def overlay(*layers: pb.SamplingParams) -> pb.SamplingParams:
    """Parameters of several layers: a later one wins in every field that it sets; lists replace lists."""
    merged = pb.SamplingParams()
    for layer in layers:
        for name in _LISTS:
            if getattr(layer, name):
                merged.ClearField(name)
        merged.MergeFrom(layer)
    return merged


def check_sampling(params: pb.SamplingParams, *, evaluation: bool) -> None:
    """Checks what every engine would refuse, before anything is generated.

    Raises:
        ContractError: no limit of new tokens, or a temperature that training cannot use.
    """
    if params.max_new_tokens < 1:
        raise ContractError("sampling.max_new_tokens", "must be set and at least 1")
    if not params.HasField("temperature"):
        return
    if params.temperature < 0 or (params.temperature == 0 and not evaluation):
        allowed = "0 or above" if evaluation else "above 0; only evaluations may be greedy"
        raise ContractError("sampling.temperature", f"must be {allowed}, got {params.temperature:g}")


def request_seed(run_seed: int, prompt_id: str, attempt: int, rollout: int, turn: int, part: int) -> int:
    """The seed of one request: a 63-bit number that depends on all of these and on nothing else.

    Args:
        run_seed: seed of the run.
        prompt_id: the prompt.
        attempt: attempt of the lease, counted from 1.
        rollout: rollout within the group, counted from 0.
        turn: model turn, counted from 0.
        part: request within the turn; a turn that was aborted goes on in the next part.
    """
    text = f"{run_seed}\0{prompt_id}\0{attempt}\0{rollout}\0{turn}\0{part}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
