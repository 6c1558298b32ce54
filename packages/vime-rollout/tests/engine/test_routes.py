"""Captured routes: rows, layers, and the experts themselves against transformers."""

import numpy as np
import pytest
from pushing import new_id
from reference import Reference

from vime_proto.common.v1 import common_pb2
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.tensor import to_numpy, to_tensor
from vime_r3.trace import decode

PROMPT = [1, 5, 9, 17, 33, 40, 8]


def ids_of(trace):
    return np.sort(decode(trace).ids, axis=-1)


@pytest.mark.parametrize(("prompt", "new"), [(PROMPT, 9), ([3], 5), (PROMPT, 1), ([3], 1)])
def test_one_row_a_token_but_the_last_in_moe_layers_only(moe, prompt, new):
    answer = moe.generate(prompt, new, return_routing=True, ignore_eos=True)
    header = answer.last.routing.header
    tokens = [*prompt, *answer.tokens]
    assert header.rows == len(tokens) - 1 and list(header.layer_ids) == [1]
    assert (header.experts, header.top_k) == (8, 2) and not header.holes and not header.inexact
    if len(tokens) > 2:
        assert np.array_equal(ids_of(answer.last.routing), Reference(moe.folder).routes(tokens)[:-1])


def test_prompt_rows_come_with_a_prefix_hit_too(moe):
    prompt = np.random.default_rng(8).integers(3, 60, 150).tolist()
    first = moe.generate(prompt, 3, return_routing=True, ignore_eos=True)
    again = moe.generate(prompt, 3, return_routing=True, ignore_eos=True)
    assert again.last.cached_tokens is not None and again.tokens == first.tokens
    assert any(one.cached_tokens > 0 for one in again.messages)
    assert again.last.routing.inline == first.last.routing.inline and not again.last.routing.header.holes


def test_rows_that_the_caller_holds_are_left_out(moe):
    whole = moe.generate(PROMPT, 5, return_routing=True, ignore_eos=True).last.routing
    part = moe.generate(PROMPT, 5, return_routing=True, routing_start_row=4, ignore_eos=True).last.routing
    assert part.header.rows == whole.header.rows - 4
    assert np.array_equal(ids_of(part), ids_of(whole)[4:])


def test_an_aborted_request_has_rows_for_exactly_its_tokens(moe):
    stream = moe.stream(PROMPT, 240, request_id="cut-routes", return_routing=True, ignore_eos=True)
    messages = [next(stream)]
    moe.rollout.Abort(pb.AbortRequest(request_ids=["cut-routes"]), timeout=10)
    messages += stream
    tokens = sum((to_numpy(one.token_ids).tolist() for one in messages if one.HasField("token_ids")), [])
    trace = messages[-1].routing
    assert trace.header.rows == len(PROMPT) + len(tokens) - 1 and not trace.header.holes
    assert np.array_equal(ids_of(trace), Reference(moe.folder).routes([*PROMPT, *tokens])[:-1])


def test_scoring_returns_routes_of_all_tokens_but_the_last(moe):
    tokens = np.random.default_rng(9).integers(3, 60, 20)
    request = pb.ScoreRequest(
        request_id=new_id(), token_ids=to_tensor(tokens.astype(np.int32)), temperature=1.0, return_routing=True
    )
    answer = moe.rollout.Score(request, timeout=30)
    assert answer.routing.header.rows == 19
    assert np.array_equal(ids_of(answer.routing), Reference(moe.folder).routes(tokens)[:-1])


def test_the_capability_is_announced_once_proved(moe, tied):
    ask = lambda engine: engine.info.GetInfo(common_pb2.GetInfoRequest(), timeout=10)  # noqa: E731
    info = ask(moe)
    assert info.capabilities["route_capture"] == "true"
    assert (info.package, info.role, info.run_id) == ("vime-rollout", "engine", "test-run")
    assert "route_capture" not in ask(tied).capabilities
