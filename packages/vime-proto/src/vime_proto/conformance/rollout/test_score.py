"""Scoring of given tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vime_proto.conformance._calls import INVALID, new_id, refused
from vime_proto.fakes import build
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.sample.v1 import sample_pb2
from vime_proto.tensor import to_numpy
from vime_proto.validate import validate_score_response


@pytest.fixture
def tolerance(request) -> float:
    """Largest difference of log-probs that two computations may show."""
    return request.config.getoption("--logprob-tolerance")


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_scores_are_what_generation_reported(engine, tolerance, temperature):
    prompt = engine.prompt(5)
    request = engine.request(prompt=prompt, temperature=temperature, max_new_tokens=8, ignore_eos=True)
    answer = engine.generate(request)
    score = engine.or_skip(
        f"scoring at temperature {temperature}",
        lambda: engine.score(prompt + answer.tokens, start=len(prompt), temperature=temperature),
    )
    np.testing.assert_allclose(to_numpy(score.logprobs), answer.logprobs, atol=tolerance)
    assert score.version == answer.last.version


def test_raw_log_probs_are_those_of_temperature_one(engine, tolerance):
    prompt = engine.prompt(5)
    request = engine.request(
        prompt=prompt, temperature=0.5, max_new_tokens=8, ignore_eos=True, logprob_mode=sample_pb2.LOGPROB_MODE_RAW
    )
    answer = engine.or_skip("raw log-probs", lambda: engine.generate(request))
    score = engine.or_skip("scoring", lambda: engine.score(prompt + answer.tokens, start=len(prompt)))
    np.testing.assert_allclose(to_numpy(score.logprobs), answer.logprobs, atol=tolerance)


def test_without_start_all_but_the_first_token_are_scored(engine):
    tokens = engine.prompt(6)
    request = pb.ScoreRequest(request_id=new_id(), token_ids=build.ids(tokens), temperature=1.0)
    response = engine.or_skip("scoring", lambda: engine.stub.Score(request, timeout=engine.timeout))
    validate_score_response(response, request)
    assert to_numpy(response.logprobs).shape == (5,)
    assert response.engine_id


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda r: r.ClearField("temperature"), "temperature"),
        (lambda r: setattr(r, "temperature", 0.0), "temperature"),
        (lambda r: setattr(r, "temperature", math.inf), "temperature"),
        (lambda r: r.token_ids.CopyFrom(build.ids([1])), "token_ids"),
        (lambda r: setattr(r, "start", 0), "start"),
        (lambda r: setattr(r, "start", 6), "start"),
        (lambda r: r.ClearField("request_id"), "request_id"),
    ],
)
def test_a_bad_request_is_refused_by_field(engine, spoil, field):
    request = pb.ScoreRequest(request_id=new_id(), token_ids=build.ids(engine.prompt(6)), temperature=1.0)
    engine.or_skip("scoring", lambda: engine.stub.Score(request, timeout=engine.timeout))
    request.request_id = new_id()
    spoil(request)
    with refused(INVALID, field=field):
        engine.stub.Score(request, timeout=engine.timeout)
