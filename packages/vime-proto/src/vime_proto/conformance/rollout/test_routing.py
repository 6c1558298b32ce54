"""Expert routes, where the server captures them."""

from __future__ import annotations

import time

import pytest

from vime_proto.conformance._calls import PRECONDITION, refused
from vime_proto.conformance._rollout_client import Answer
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.validate import validate_trace


@pytest.fixture
def capturing(engine):
    """The client, when the server says that it captures routes."""
    if engine.capabilities.get("route_capture") != "true":
        pytest.skip("the target does not state the capability route_capture")
    return engine


def test_without_the_capability_routes_are_refused(engine):
    if (
        engine.capabilities.get("route_capture") == "true"
        or "vime.rollout.v1.EngineControlService" not in engine.services
    ):
        pytest.skip("the target captures routes, or is no engine")
    with refused(PRECONDITION):
        list(engine.start(engine.request(return_routing=True)))


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("new", [1, 2, 5])
def test_there_is_a_row_for_every_processed_token(capturing, length, new):
    request = capturing.request(
        prompt=capturing.prompt(length), max_new_tokens=new, ignore_eos=True, return_routing=True
    )
    answer = capturing.generate(request)
    assert not any(message.HasField("routing") for message in answer.messages[:-1])
    header = answer.last.routing.header
    validate_trace(answer.last.routing, tokens=length + new)
    info = capturing.info
    assert (header.experts, header.top_k) == (info.experts, info.top_k_experts)
    assert list(header.layer_ids) == list(info.moe_layer_ids), "dense layers do not appear"
    assert all(span.version == info.version for span in header.spans)


def test_rows_that_the_caller_holds_are_left_out(capturing):
    prompt = capturing.prompt(6)
    request = capturing.request(
        prompt=prompt, max_new_tokens=3, ignore_eos=True, return_routing=True, routing_start_row=4
    )
    trace = capturing.generate(request).last.routing
    assert trace.header.rows == 6 + 3 - 1 - 4, "row 0 of the answer is row routing_start_row of the sample"


def test_the_same_tokens_take_the_same_routes(capturing):
    request = {"max_new_tokens": 4, "ignore_eos": True, "return_routing": True, "temperature": 0.0}
    first, second = (capturing.generate(capturing.request(**request)) for _ in range(2))
    assert first.tokens == second.tokens
    assert not second.last.routing.header.holes, "rows of cached prompt tokens must be there too"
    assert first.last.routing.inline == second.last.routing.inline


def test_without_asking_there_are_no_routes(capturing):
    assert not capturing.generate().last.HasField("routing")


def test_an_abort_brings_rows_of_exactly_the_returned_tokens(capturing):
    prompt = capturing.prompt(4)
    request = capturing.long_request(prompt=prompt, return_routing=True)
    began = time.monotonic()
    stream = capturing.start(request)
    messages = [next(stream) for _ in range(2)]
    seconds = time.monotonic() - began
    capturing.stub.Abort(pb.AbortRequest(request_ids=[request.request_id]), timeout=capturing.timeout)
    answer = Answer(messages + list(stream))
    answer.check(request)
    capturing.ended_early(answer, seconds)
    assert answer.last.routing.header.rows == len(prompt) + len(answer.tokens) - 1
