"""vLLM's outputs, turned into ours at the moment that vLLM's output loop produces them."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.engine.exceptions import EngineDeadError

from vime_rollout.engine._types import BackendDeadError, Output, Sink

_FINISH = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}


class SinkCollector:
    """Takes the place of vLLM's per-request queue, which merges outputs when its reader is late and then loses routes.

    ``put`` runs inside vLLM's output loop, in order: what is stamped here cannot be stamped late.
    """

    def __init__(self, request_id: str, sink: Sink):
        self.request_id = request_id
        self._sink = sink
        self._first = True

    def put(self, output: Any) -> None:
        """One delta, or the error that ended the request."""
        if isinstance(output, Exception):
            dead = isinstance(output, EngineDeadError)
            self._sink(BackendDeadError("vLLM's engine core has ended") if dead else output)
            return
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        finish = completion.finish_reason if output.finished else None
        converted = Output(
            tokens=tokens,
            logprobs=[],
            cached_tokens=output.num_cached_tokens if self._first else None,
            finish=_FINISH.get(finish, "error") if finish is not None else None,
            stop_token=completion.stop_reason if isinstance(completion.stop_reason, int) else None,
            routes=completion.routed_experts,
        )
        if tokens:
            _logprobs(completion.logprobs, converted)
        if self._first and output.prompt_logprobs is not None:
            converted.prompt_logprobs = _table(output.prompt_logprobs)
        # Before the first token only an abort arrives, and it knows nothing about the cache.
        self._first = self._first and not tokens
        self._sink(converted)

    def close(self) -> None:
        """Part of the queue's interface."""


def _logprobs(flat: Any, into: Output) -> None:
    if flat is None or len(flat) != len(into.tokens):
        raise RuntimeError(f"{len(into.tokens)} tokens came with {0 if flat is None else len(flat)} log-probabilities")
    # The sampled token's entry is the first of its position.
    into.logprobs = [flat.logprobs[start] for start in flat.start_indices]
    if len(flat.logprobs) > len(flat):
        into.top = [pairs[1:] for pairs in _positions(flat)]


def _table(flat: Any) -> tuple[np.ndarray, np.ndarray]:
    # The first position of a prompt has no log-probability; all others have the same number.
    shape = (len(flat) - 1, -1)
    return np.array(flat.token_ids, dtype=np.int32).reshape(shape), np.array(flat.logprobs, dtype=np.float64).reshape(
        shape
    )


def _positions(flat: Any) -> list[list[tuple[int, float]]]:
    return [
        list(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
    ]
