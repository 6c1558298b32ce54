"""Captured routes of an answer as a trace."""

from __future__ import annotations

from vime_proto.common.v1.common_pb2 import IndexRange
from vime_proto.routing.v1 import routing_pb2
from vime_r3 import capture
from vime_rollout.engine._generation import Generation
from vime_rollout.engine._model import ModelDescription


def trace(
    generation: Generation, model: ModelDescription, start_row: int = 0, generated: int | None = None
) -> routing_pb2.RoutingTrace:
    """Rows ``[start_row, prompt + generated - 1)``; ``generated`` counts the tokens wanted, default all.

    A request that an update overtook (policy KEEP) has rows of several versions: a token's row is computed when the token is
    read, so the last token before the update is read under the new weights. From there on rows cannot be replayed exactly, since
    the engine recomputed what precedes them.

    Raises:
        ContractError: what was captured cannot be right; see ``vime_r3.capture.from_vllm``.
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
        version=generation.spans[0][1],
        prompt_tokens=len(generation.prompt),
        generated_tokens=generated,
        start_row=start_row,
    )
    if len(generation.spans) > 1:
        _split(result.header, generation, start_row)
    return result


def _split(header: routing_pb2.RoutingTraceHeader, generation: Generation, start_row: int) -> None:
    first = [len(generation.prompt) + token - 1 - start_row for token, _ in generation.spans]
    first[0] = 0
    edges = [*first[1:], header.rows]
    filled = [(span.rows.start, span.rows.stop) for span in header.spans]
    del header.spans[:]
    for low, high, (_, version) in zip(first, edges, generation.spans, strict=True):
        for start, stop in filled:
            start, stop = max(start, low, 0), min(stop, high)
            if start < stop:
                header.spans.add(rows=IndexRange(start=start, stop=stop), version=version)
    if max(first[1], 0) < header.rows:
        header.inexact.add(start=max(first[1], 0), stop=header.rows)
