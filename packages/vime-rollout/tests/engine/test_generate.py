"""Generate: limits, stops, replays, cancellation, versions, the prefix cache."""

import threading
import time

import grpc
import models
import numpy as np
import pytest
from pushing import new_id

from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.tensor import to_numpy, to_tensor
from vime_proto.version import policy_version

PROMPT = [1, 5, 9, 17, 33, 40, 8]


def refused(engine, code, text, *args, **more):
    with pytest.raises(grpc.RpcError) as error:
        engine.generate(*args, **more)
    assert error.value.code() is code
    assert text in error.value.details()


def until_idle(engine, seconds=60.0):
    deadline = time.monotonic() + seconds
    while engine.status().running:
        assert time.monotonic() < deadline, "requests still run"
        threading.Event().wait(0.02)


def test_a_short_answer_comes_in_one_message_that_says_it_all(tied):
    answer = tied.generate(PROMPT, 4, ignore_eos=True)
    assert len(answer.messages) == 1
    assert len(answer.tokens) == len(answer.logprobs) == 4
    assert answer.finish == "LENGTH" and answer.last.engine_id == "tied-engine"
    assert answer.last.version == tied.status().version
    assert answer.last.HasField("cached_tokens") and not answer.last.HasField("stop_included")


def test_stops_at_the_end_token_and_returns_it(tied):
    free = tied.generate(PROMPT, 8, ignore_eos=True)
    wanted = free.tokens[2]
    answer = tied.generate(PROMPT, 8, ignore_eos=True, stop_token_ids=[wanted])
    assert answer.finish == "STOP" and answer.last.stop_token_id == wanted and answer.last.stop_included
    assert answer.tokens == free.tokens[: free.tokens.index(wanted) + 1]
    assert len(answer.tokens) == len(answer.logprobs)


def test_end_of_sequence_ends_unless_ignored(tied):
    # A head of one direction: whatever comes, the end token is the most likely one.
    certain = {name: value.copy() for name, value in tied.tensors.items()}
    certain["model.embed_tokens.weight"][:] *= 0.01
    certain["model.embed_tokens.weight"][models.EOS] = 1.0
    certain["model.norm.weight"][:] = 1.0
    pusher = tied.pusher()
    pusher.push(certain, tied.next_version())
    try:
        found = [tied.generate([token], 6).tokens for token in range(3, 40)]
        ended = [tokens for tokens in found if models.EOS in tokens]
        assert ended and all(tokens.index(models.EOS) == len(tokens) - 1 for tokens in ended)
        prompt = next(token for token, tokens in zip(range(3, 40), found, strict=True) if models.EOS in tokens)
        answer = tied.generate([prompt], 6)
        assert answer.finish == "STOP" and answer.last.stop_token_id == models.EOS and answer.last.stop_included
        assert len(tied.generate([prompt], 6, ignore_eos=True).tokens) == 6
    finally:
        pusher.push(tied.tensors, tied.next_version())


def test_the_context_limits_the_answer(tied):
    prompt = [5] * 250
    answer = tied.generate(prompt, 50, ignore_eos=True)
    assert len(answer.tokens) == 6 and answer.finish == "LENGTH"
    refused(tied, grpc.StatusCode.INVALID_ARGUMENT, "256", [5] * 256, 1)


def test_bad_requests_name_the_field_and_the_request(tied):
    refused(tied, grpc.StatusCode.INVALID_ARGUMENT, "prompt_token_ids", [5, models.VOCAB], 4)
    refused(tied, grpc.StatusCode.INVALID_ARGUMENT, "prompt_token_ids", [5, -1], 4)
    refused(tied, grpc.StatusCode.INVALID_ARGUMENT, "max_new_tokens", [5], 0)
    refused(tied, grpc.StatusCode.INVALID_ARGUMENT, "temperature", [5], 1, temperature=-1.0)
    refused(tied, grpc.StatusCode.INVALID_ARGUMENT, "no tokenizer", [5], 1, stop=["x"])
    refused(tied, grpc.StatusCode.INVALID_ARGUMENT, "stop_token_ids[0]", [5], 1, stop_token_ids=[models.VOCAB])
    refused(tied, grpc.StatusCode.FAILED_PRECONDITION, "does not capture routes", [5], 1, return_routing=True)


def test_a_repeated_id_replays_from_the_first_token(tied):
    first = tied.generate(PROMPT, 6, request_id="again", temperature=1.0)
    again = tied.generate(PROMPT, 6, request_id="again", temperature=1.0)
    assert again.tokens == first.tokens and np.array_equal(again.logprobs, first.logprobs)
    assert again.last == first.last
    refused(tied, grpc.StatusCode.INVALID_ARGUMENT, "another payload", PROMPT, 7, request_id="again", temperature=1.0)


def test_concurrent_repetitions_share_one_generation(tied):
    streams = [tied.stream(PROMPT, 40, request_id="shared", temperature=1.0, ignore_eos=True) for _ in range(3)]
    answers = [[to_numpy(one.token_ids).tolist() for one in stream if one.HasField("token_ids")] for stream in streams]
    assert len({str(sum(one, [])) for one in answers}) == 1


def test_a_seed_makes_sampling_repeatable(tied):
    a, b, c = (tied.generate(PROMPT, 12, temperature=1.0, seed=seed, ignore_eos=True).tokens for seed in (3, 3, 4))
    assert a == b and a != c


def test_cancelling_a_call_ends_the_request_in_the_engine(tied):
    stream = tied.stream([7, 8], 250, request_id="cancelled", ignore_eos=True)
    got = 0
    while got < 3:
        got += next(stream).token_ids.shape[0]
    stream.cancel()
    until_idle(tied)
    # Whoever asks again gets a fresh and whole answer, not the remains.
    assert len(tied.generate([7, 8], 250, request_id="cancelled", ignore_eos=True).tokens) == 250


def test_abort_answers_with_what_there_is(tied):
    stream = tied.stream([7, 8], 250, request_id="aborted", ignore_eos=True)
    first = next(stream)
    found = tied.rollout.Abort(pb.AbortRequest(request_ids=["aborted", "unknown"]), timeout=10)
    assert list(found.aborted) == ["aborted"]
    rest = list(stream)
    assert rest[-1].finish_reason == 3 and rest[-1].version == tied.status().version
    tokens = sum((to_numpy(one.token_ids).tolist() for one in [first, *rest] if one.HasField("token_ids")), [])
    whole = tied.generate([7, 8], 250, ignore_eos=True)
    assert 0 < len(tokens) < 250 and whole.tokens[: len(tokens)] == tokens
    again = tied.generate([7, 8], 250, request_id="aborted", ignore_eos=True)
    assert again.tokens == tokens and again.finish == "ABORT"


def test_a_request_that_waits_and_is_aborted_still_states_a_version(tied):
    tied.control.Pause(pb.PauseRequest(request_id=new_id()), timeout=10)
    stream = tied.stream([7, 8], 4, request_id="waits")
    deadline = time.monotonic() + 5
    while not tied.status().waiting:
        assert time.monotonic() < deadline
    assert list(tied.rollout.Abort(pb.AbortRequest(), timeout=10).aborted) == ["waits"]
    (message,) = list(stream)
    assert message.finish_reason == 3 and message.version == tied.status().version and not message.HasField("token_ids")
    tied.control.Resume(pb.ResumeRequest(request_id=new_id()), timeout=10)


def test_minimum_version_waits_for_an_update(tied):
    version = tied.next_version()
    stream = tied.stream(PROMPT, 2, minimum_version=version)
    tied.pusher().push(tied.tensors, version)
    assert all(one.version == version for one in stream)
    started = time.monotonic()
    refused(
        tied,
        grpc.StatusCode.FAILED_PRECONDITION,
        "needs other/0:9",
        PROMPT,
        2,
        minimum_version=policy_version("other", 0, 9),
    )
    assert time.monotonic() - started < 30


def test_the_prefix_cache_ends_with_its_version(tied):
    prompt = list(np.random.default_rng(5).integers(3, 60, 200))
    tied.generate(prompt, 1)
    assert tied.generate(prompt, 1).last.cached_tokens > 0
    tied.pusher().push(models.weights(tied.config, 31), tied.next_version())
    assert tied.generate(prompt, 1).last.cached_tokens == 0
    tied.pusher().push(tied.tensors, tied.next_version())
    assert tied.generate(prompt, 1).last.cached_tokens == 0


def test_model_info(moe, tied):
    info = moe.model
    assert (info.experts, info.top_k_experts, list(info.moe_layer_ids)) == (8, 2, [1])
    assert info.architecture == "Qwen3MoeForCausalLM" and info.vocab_size == models.VOCAB and info.max_model_len == 256
    assert list(info.eos_token_ids) == [models.EOS] and len(info.model_digest) == 64
    assert tied.model.experts == 0 and not tied.model.moe_layer_ids


def test_many_short_requests_at_once(tied):
    prompts = np.random.default_rng(3).integers(3, 60, (256, 6))
    streams = [tied.stream(prompt, 4, temperature=1.0, ignore_eos=True) for prompt in prompts.tolist()]
    assert [sum(to_numpy(one.token_ids).size for one in stream) for stream in streams] == [4] * 256
    assert tied.status().running == 0


def test_scoring_needs_a_temperature(tied):
    with pytest.raises(grpc.RpcError) as error:
        request = pb.ScoreRequest(request_id="no-t", token_ids=to_tensor(np.array([5, 6], dtype=np.int32)))
        tied.rollout.Score(request, timeout=10)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "temperature" in error.value.details()


def test_more_seeded_prompts_than_one_step_reads_are_all_answered(moe):
    rng = np.random.default_rng(3)
    streams = [
        moe.stream(rng.integers(3, 60, 200).tolist(), 2, temperature=1.0, seed=n, ignore_eos=True) for n in range(24)
    ]
    tokens = [sum(to_numpy(part.token_ids).size for part in one if part.HasField("token_ids")) for one in streams]
    assert tokens == [2] * 24
