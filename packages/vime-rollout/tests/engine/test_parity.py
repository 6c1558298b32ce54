"""Log-probabilities against transformers in float32, before and after weight updates."""

import models
import numpy as np
import pytest
from reference import Reference

from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.sample.v1 import sample_pb2 as sample
from vime_proto.tensor import to_numpy, to_tensor

PROMPTS = [[1, 5, 9, 17, 33, 40, 8], [3], list(range(3, 40))]
BOUND = 1e-5


def check(engine, reference, temperature):
    for prompt in PROMPTS:
        answer = engine.generate(prompt, 12, temperature=temperature, ignore_eos=True, seed=11)
        expected = reference.of_response(prompt, answer.tokens, temperature)
        assert np.abs(answer.logprobs - expected).max() < BOUND


@pytest.mark.parametrize("name", ["moe", "tied"])
def test_sampled_logprobs_equal_transformers_before_and_after_an_update(name, request, tmp_path):
    engine = request.getfixturevalue(name)
    engine.pusher().push(engine.tensors, engine.next_version())
    for temperature in (1.0, 0.7):
        check(engine, Reference(engine.folder), temperature)
    other = models.weights(engine.config, 21)
    engine.pusher().push(other, engine.next_version(), chunks=3)
    check(engine, Reference.of(tmp_path / "other", engine.config, other), 1.0)
    engine.pusher().push(engine.tensors, engine.next_version())


def score(engine, tokens, temperature, **more):
    request = pb.ScoreRequest(
        request_id=f"score-{temperature}-{len(tokens)}-{sorted(more)}",
        token_ids=to_tensor(np.array(tokens, dtype=np.int32)), temperature=temperature, **more,
    )  # fmt: skip
    return engine.rollout.Score(request, timeout=60)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_equal_transformers_at_any_temperature(tied, temperature):
    tokens = PROMPTS[2]
    table = Reference(tied.folder).logprobs(tokens, temperature)
    answer = score(tied, tokens, temperature, start=4, top_logprobs=3)
    expected = np.array([table[i - 1, tokens[i]] for i in range(4, len(tokens))])
    assert np.abs(to_numpy(answer.logprobs) - expected).max() < BOUND
    top = to_numpy(answer.top_logprobs.logprobs)
    assert top.shape == (len(tokens) - 4, 3)
    assert np.abs(top - np.sort(table[3:-1], axis=-1)[:, ::-1][:, :3]).max() < BOUND
    assert answer.version == tied.status().version and answer.engine_id == "tied-engine"
    assert score(tied, tokens, temperature, start=4, top_logprobs=3) == answer  # the same id again


def test_alternatives_are_the_most_likely_tokens(tied):
    prompt = PROMPTS[0]
    answer = tied.generate(prompt, 4, temperature=1.0, top_logprobs=5, ignore_eos=True)
    table = Reference(tied.folder).logprobs([*prompt, *answer.tokens])
    ids = np.concatenate([to_numpy(one.top_logprobs.token_ids) for one in answer.messages])
    values = np.concatenate([to_numpy(one.top_logprobs.logprobs) for one in answer.messages])
    for i in range(4):
        row = table[len(prompt) - 1 + i]
        assert ids[i].tolist() == np.argsort(-row)[:5].tolist()
        assert np.abs(values[i] - row[ids[i]]).max() < BOUND


def test_raw_logprobs_only_where_they_equal_processed_ones(tied):
    import grpc

    raw = sample.LOGPROB_MODE_RAW
    assert len(tied.generate([5, 6], 2, temperature=1.0, logprob_mode=raw, ignore_eos=True).tokens) == 2
    with pytest.raises(grpc.RpcError) as error:
        tied.generate([5, 6], 2, temperature=0.5, logprob_mode=raw)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION and "logprob_mode" in error.value.details()
