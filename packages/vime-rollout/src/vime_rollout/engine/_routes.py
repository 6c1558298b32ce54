"""Captured routes of an answer as a trace."""

from __future__ import annotations

from vime_proto.routing.v1 import routing_pb2
from vime_r3 import capture
from vime_r3.trace import remark
from vime_rollout.engine._generation import Generation
from vime_rollout.engine._model import ModelDescription


def trace(
    generation: Generation, model: ModelDescription, start_row: int = 0, generated: int | None = None
) -> routing_pb2.RoutingTrace:
    """Rows ``[start_row, prompt + generated - 1)``; ``generated`` counts the tokens wanted, default all.

    A request that an update overtook (policy KEEP) has rows of several versions; see ``vime_r3.capture.from_vllm``. One that was
    overtaken before its first token may have had a part of its prompt read under the weights before: all its rows are inexact.

    Raises:
        ContractError: what was captured cannot be right.
    """
    generated = len(generation.tokens) if generated is None else generated
    routes = generation.routes
    if routes is not None and generated < len(generation.tokens):
        routes = routes[: len(generation.prompt) + generated - 1]
    result = capture.from_vllm(
        routes,
        moe_layer_ids=model.moe_layer_ids,
        experts=model.experts,
        top_k=model.top_k,
        version=[(token, version) for token, version in generation.spans if token <= max(generated - 1, 0)],
        prompt_tokens=len(generation.prompt),
        generated_tokens=generated,
        start_row=start_row,
    )
    if generation.sent_under not in (None, generation.spans[0][1]):
        return remark(result, [(0, result.header.rows)])
    return result
