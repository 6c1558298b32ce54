"""One array each for a step's log-probs and routes: put together in the core, taken apart in the front end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from vllm import envs
from vllm.v1.outputs import LogprobsLists

from vime_rollout.engine.backend import _frames


@dataclasses.dataclass
class Rows:
    """A step's routes.

    Attributes:
        ids: ``[tokens, layers, top_k]``.
        last: where each request's last row is.
        prompts: routes of those requests that get more than their last row.
    """

    ids: np.ndarray
    last: Mapping[str, int]
    prompts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, ids: np.ndarray, scheduler_output: Any, model_runner_output: Any) -> Rows:
        """Rows lie in the order of the worker's batch, those of a request together."""
        names = model_runner_output.req_ids
        if len(ids) == len(names):
            return cls(ids, model_runner_output.req_id_to_index)
        counts = scheduler_output.num_scheduled_tokens
        ends = accumulate(map(counts.__getitem__, names))
        return cls(ids, {name: end - 1 for name, end in zip(names, ends, strict=True)})

    def take(self, requests: list[str], chunk: list[Any]) -> np.ndarray | None:
        """The frame of some requests' outputs."""
        # vLLM also answers for requests outside the step, such as those it could not load: they have no new token.
        ends = [self.last.get(one, -1) + 1 for one in requests]
        prompts = self.prompts
        whole = {place: prompts[one] for place, one in enumerate(requests) if one in prompts} if prompts else {}
        return _frames.take(requests, self.ids, ends, [len(one.new_token_ids) for one in chunk], whole)


def pack(outputs: list[Any], rows: Rows | None = None) -> None:
    """Joins what the outputs hold. With ``rows`` their routes are taken from there."""
    for chunk in _chunks(outputs):
        requests = [one.request_id for one in chunk]
        if rows is None:
            routes = _frames.join(requests, [one.routed_experts for one in chunk])
        else:
            routes = rows.take(requests, chunk)
        if routes is not None:
            for one in chunk:
                one.routed_experts = None
            chunk[0].routed_experts = routes
        logprobs = _frames.join_logprobs(requests, [one.new_logprobs for one in chunk])
        if logprobs is not None:
            for one in chunk:
                one.new_logprobs = None
            chunk[0].new_logprobs = LogprobsLists(*logprobs)


def take_apart(output_processor: Any) -> None:
    """Makes vLLM's ``OutputProcessor`` understand joined outputs; a scheduler of its own kind goes on working."""
    process = output_processor.process_outputs

    def process_outputs(outputs: Any, *arguments: Any, **named: Any) -> Any:
        unpack(outputs)
        return process(outputs, *arguments, **named)

    output_processor.process_outputs = process_outputs


def unpack(outputs: list[Any]) -> None:
    """Gives each request's output what is its own again."""
    for chunk in _chunks(outputs):
        requests = [one.request_id for one in chunk]
        routes, logprobs = chunk[0].routed_experts, chunk[0].new_logprobs
        if _frames.is_frame(routes):
            for one, rows in zip(chunk, _frames.split(requests, routes), strict=True):
                one.routed_experts = rows
        if logprobs is not None and logprobs.cu_num_generated_tokens is not None:
            for one, values in zip(chunk, _frames.split_logprobs(requests, logprobs), strict=True):
                one.new_logprobs = None if values is None else LogprobsLists(*values)


def _chunks(outputs: list[Any]) -> Iterator[list[Any]]:
    """Outputs as the front end takes them; a frame lies in the first of each chunk."""
    size = envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
    return (outputs[start : start + size] for start in range(0, len(outputs), size))
