"""From streamed deltas to samples: what was sampled is what is trained."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest
from worker_models import ABORT, LENGTH, RUN, STOP, ScriptedEngine, answering, delta, ids_of, until

from vime_proto import metadata
from vime_proto.channel import open_channel
from vime_proto.common.v1 import common_pb2
from vime_proto.errors import ContractError, StatusError
from vime_proto.fakes import build, serve
from vime_proto.rollout.v1.rollout_pb2 import GenerateResponse
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_numpy, to_tensor
from vime_proto.validate import validate_sample
from vime_proto.version import policy_version, show
from vime_rollout.worker._client import Generator, TurnRequest
from vime_rollout.worker._deltas import Deltas
from vime_rollout.worker._errors import RolloutError
from vime_rollout.worker._trajectory import Trajectory

PROMPT = np.array([3, 4, 5], np.int32)


def turn(max_new_tokens=100, **fields) -> TurnRequest:
    return TurnRequest(
        "k", pb.SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens), lambda part: part, **fields
    )


@pytest.fixture
async def generate():
    """Runs one turn on a scripted engine."""

    async def run(script, request=None, trajectory=None, **options):
        engine = ScriptedEngine(script)
        trajectory = trajectory or Trajectory(PROMPT)
        async with serve(engine) as at, open_channel(at.address) as channel:
            finish = await Generator(channel, **options).turn(trajectory, request or turn())
        return trajectory.sample("s"), finish, engine

    return run


def model_ids(sample):
    return [ids_of(one.token_ids) for one in sample.segments if one.role == pb.SEGMENT_ROLE_MODEL]


def versions(sample):
    return [one.generation.version.number for one in sample.segments if one.role == pb.SEGMENT_ROLE_MODEL]


async def test_chunks_are_concatenated(generate):
    async def script(request, seen):
        yield delta([10, 11], logprobs=[-0.1, -0.2])
        yield delta([12], logprobs=[-0.3])
        yield delta([13, 2], finish=STOP, logprobs=[-0.4, -0.5], stop_included=True)

    sample, finish, _ = await generate(script)
    assert finish == STOP and model_ids(sample) == [[10, 11, 12, 13, 2]]
    generation = sample.segments[1].generation
    assert np.allclose(to_numpy(generation.logprobs), [-0.1, -0.2, -0.3, -0.4, -0.5])
    validate_sample(sample)


async def test_a_turn_that_is_aborted_goes_on_with_what_is_left_of_its_budget(generate):
    async def script(request, seen):
        if request.request_id == "k.0":
            yield delta(range(10, 40), 0)
            yield delta(range(40, 70), 0, ABORT)
        else:
            yield delta([7, 2], 1, STOP)

    sample, finish, engine = await generate(script)
    first, second = engine.requests
    assert first.sampling.max_new_tokens == 100 and second.sampling.max_new_tokens == 40
    assert ids_of(second.prompt_token_ids) == [3, 4, 5, *range(10, 70)]
    assert first.sampling.seed != second.sampling.seed
    assert model_ids(sample) == [list(range(10, 70)), [7, 2]] and versions(sample) == [0, 1]
    assert [one.generation.finish_reason for one in sample.segments[1:]] == [ABORT, STOP]
    assert finish == STOP
    validate_sample(sample)


async def test_a_turn_without_seeds_leaves_random_numbers_to_the_engine(generate):
    asked = pb.SamplingParams(temperature=1.0, max_new_tokens=4, seed=7)
    _, _, engine = await generate(answering([5, 2]), TurnRequest("k", asked, lambda part: None))
    assert [one.sampling.HasField("seed") for one in engine.requests] == [False] and asked.seed == 7


async def test_what_is_there_counts_against_the_limit(generate):
    def half_done(count):
        trajectory = Trajectory(PROMPT)
        earlier = Deltas("earlier")
        earlier.add(delta(range(count), 0, ABORT))
        trajectory.add_sampled(earlier, pb.SamplingParams(max_new_tokens=100))
        return trajectory

    _, _, engine = await generate(answering([2]), turn(generated=60), half_done(60))
    assert [one.sampling.max_new_tokens for one in engine.requests] == [40]
    sample, finish, engine = await generate(answering([2]), turn(generated=100), half_done(100))
    assert engine.requests == [] and finish == LENGTH and len(model_ids(sample)[0]) == 100


async def test_the_context_limits_the_budget_too(generate):
    _, _, engine = await generate(answering([2]), max_model_len=10)
    assert engine.requests[0].sampling.max_new_tokens == 7


async def test_an_abort_after_a_preemption_keeps_what_was_generated(generate):
    async def script(request, seen):
        if request.request_id == "k.0":
            yield delta([10, 11, 12, 13])
            yield delta(finish=ABORT)
        else:
            yield delta([2], finish=STOP)

    sample, _, _ = await generate(script)
    assert model_ids(sample) == [[10, 11, 12, 13], [2]]


async def test_an_abort_before_the_first_token_leaves_no_trace_of_the_old_version(generate):
    async def script(request, seen):
        if request.request_id == "k.0":
            yield delta(number=0, finish=ABORT)
        else:
            yield delta([7, 2], 1, STOP)

    sample, _, _ = await generate(script)
    assert model_ids(sample) == [[7, 2]] and versions(sample) == [1]


def test_a_sample_without_a_token_still_states_its_version():
    trajectory, deltas = Trajectory(PROMPT), Deltas("k")
    deltas.add(delta(number=4, finish=ABORT))
    trajectory.add_sampled(deltas, pb.SamplingParams(temperature=1.0, max_new_tokens=4))
    sample = trajectory.sample("s")
    assert model_ids(sample) == [[]] and versions(sample) == [4]
    validate_sample(sample)


@pytest.mark.parametrize("ids", [[], [2]])
async def test_empty_and_end_only_responses_are_samples(generate, ids):
    async def script(request, seen):
        yield delta(ids, finish=STOP, logprobs=[-4.6] * len(ids))

    sample, finish, _ = await generate(script)
    assert finish == STOP and model_ids(sample) == [ids]
    # The end token keeps the log-prob that it was sampled with: ln 0.01.
    assert np.allclose(to_numpy(sample.segments[1].generation.logprobs), [-4.6] * len(ids))
    assert sample.segments[1].trainable_all
    validate_sample(sample)


async def test_zeros_are_values(generate):
    async def script(request, seen):
        yield delta([0], number=0, finish=STOP, logprobs=[0.0], cached_tokens=0)

    sample, _, _ = await generate(script)
    again = pb.Sample.FromString(sample.SerializeToString())
    generation = again.segments[1].generation
    assert ids_of(again.segments[1].token_ids) == [0] and ids_of(generation.logprobs) == [0.0]
    assert generation.version.HasField("number") and generation.version.number == 0
    assert generation.HasField("cached_tokens") and generation.cached_tokens == 0


async def test_another_version_within_a_stream_starts_another_segment(generate):
    async def script(request, seen):
        yield delta([10, 11], 3)
        yield delta(number=4)
        yield delta([12], 4)
        yield delta([13, 2], 4, STOP)

    sample, _, _ = await generate(script)
    assert model_ids(sample) == [[10, 11], [12, 13, 2]] and versions(sample) == [3, 4]


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_lost_reply_is_asked_for_again_and_counted_once(generate, lost):
    async def script(request, seen):
        messages = [delta([10, 11]), delta([12], finish=STOP)]
        for message in messages[: lost if seen == 0 else None]:
            yield message
        if seen == 0:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, "engine restarts")

    sample, _, engine = await generate(script)
    assert model_ids(sample) == [[10, 11, 12]]
    assert [one.request_id for one in engine.requests] == ["k.0"] * (1 if lost == 2 else 2)
    assert engine.requests[0] == engine.requests[-1]


async def test_engines_that_stay_away_fail_the_rollout(generate):
    async def script(request, seen):
        raise StatusError(grpc.StatusCode.UNAVAILABLE, "engine-0 is asleep")
        yield

    with pytest.raises(RolloutError, match=r"'k\.0'.*engine-0 is asleep") as caught:
        await generate(script, retry_seconds=0.3)
    assert caught.value.retryable and caught.value.stage == "generate"


async def test_a_refused_request_is_not_repeated(generate):
    seen_ids = []

    async def script(request, seen):
        seen_ids.append(request.request_id)
        raise ContractError("sampling.stop", "this engine has no tokenizer")
        yield

    with pytest.raises(RolloutError, match=r"sampling\.stop: this engine has no tokenizer") as caught:
        await generate(script)
    assert not caught.value.retryable and seen_ids == ["k.0"]


def ragged(values, offsets):
    return pb.RaggedTensor(values=build.ids(values), offsets=to_tensor(np.array(offsets, np.uint64)))


def bad_delta(**changes):
    message = delta([10, 11], finish=STOP)
    for name, value in changes.items():
        getattr(message, name).CopyFrom(value)
    return message


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (bad_delta(logprobs=to_tensor(np.zeros(3, np.float32))), r"\[2\] ids .* \[3\] log-probs .* do not fit"),
        (bad_delta(logprobs=to_tensor(np.zeros(2, np.float64))), "log-probs FLOAT32"),
        (bad_delta(logprobs=to_tensor(np.array([0, np.nan], np.float32))), "token 1 of 2 has log-prob nan"),
        (bad_delta(logprobs=to_tensor(np.array([-np.inf, 0], np.float32))), "token 0 of 2 has log-prob -inf"),
        (bad_delta(version=common_pb2.PolicyVersion()), None),
        (bad_delta(kept_token_ids=ragged([1], [0, 1])), "1 rows for 2 tokens"),
    ],
)
async def test_answers_that_do_not_fit_are_refused_with_the_request(generate, message, text):
    async def script(request, seen):
        if text is None:
            message.ClearField("version")
        yield message

    with pytest.raises(RolloutError, match=text or "no version") as caught:
        await generate(script)
    assert "'k.0'" in str(caught.value)


async def test_kept_sets_and_alternatives_of_chunks_are_joined(generate):
    def kept(*rows):
        return pb.RaggedTensor(
            values=build.ids([one for row in rows for one in row]),
            offsets=to_tensor(np.cumsum([0, *map(len, rows)]).astype(np.uint64)),
        )

    def top(rows):
        return pb.TopLogprobs(token_ids=build.ids([[1, 2]] * rows), logprobs=build.floats([[-0.1, -0.2]] * rows))

    async def script(request, seen):
        yield delta([10], kept_token_ids=kept([10, 20]), top_logprobs=top(1))
        yield delta([11, 12], finish=STOP, kept_token_ids=kept([11], [12, 30, 31]), top_logprobs=top(2))

    sample, _, _ = await generate(script)
    generation = sample.segments[1].generation
    assert ids_of(generation.kept_token_ids.values) == [10, 20, 11, 12, 30, 31]
    assert ids_of(generation.kept_token_ids.offsets) == [0, 2, 3, 6]
    assert list(generation.top_logprobs.token_ids.shape) == [3, 2]
    validate_sample(sample)


def routes(tokens, number, value):
    ids = np.full((tokens - 1, 2, 2), value, np.uint8)
    ids[:, :, 1] = value + 1
    return build.trace(ids, policy_version(RUN, 0, number), experts=8)


async def test_routes_of_a_newer_version_replace_the_earlier_ones(generate):
    from vime_r3.trace import decode

    async def script(request, seen):
        if request.request_id == "k.0":
            yield delta([10, 11], 0)
            yield delta([], 0, ABORT, routing=routes(5, 0, 1))
        else:
            yield delta([12, 2], 1, STOP, routing=routes(7, 1, 4))

    sample, _, engine = await generate(script, turn(routing=True))
    assert all(one.return_routing for one in engine.requests)
    header = sample.routing.header
    assert header.rows == 6 and not header.holes
    assert [(one.start, one.stop) for one in header.inexact] == [(0, 4)]
    assert [span.version.number for span in header.spans] == [1]
    assert (decode(sample.routing).ids[:, :, 0] == 4).all()
    validate_sample(sample)


async def test_routes_of_an_abort_before_the_first_token_leave_no_trace_either(generate):
    async def script(request, seen):
        if request.request_id == "k.0":
            yield delta([], 0, ABORT, routing=routes(3, 0, 1))
        else:
            yield delta([12, 2], 1, STOP, routing=routes(5, 1, 4))

    sample, _, _ = await generate(script, turn(routing=True))
    header = sample.routing.header
    assert header.rows == 4 and not header.holes and not header.inexact
    assert [span.version.number for span in header.spans] == [1]


async def test_rows_that_the_engine_calls_inexact_stay_so_after_an_empty_abort(generate):
    from vime_r3.trace import remark

    async def script(request, seen):
        if request.request_id == "k.0":
            yield delta([], 0, ABORT, routing=routes(3, 0, 1))
        else:
            yield delta([12, 2], 1, STOP, routing=remark(routes(5, 1, 4), [(3, 4)]))

    sample, _, _ = await generate(script, turn(routing=True))
    assert [(one.start, one.stop) for one in sample.routing.header.inexact] == [(3, 4)]


async def test_routes_never_go_back_to_older_weights(generate):
    """While engines are updated one after the other, the next request might meet one that is still behind."""

    async def script(request, seen):
        if request.request_id == "k.0":
            yield delta([10, 11], 2)
            yield delta([], 2, ABORT, routing=routes(5, 2, 1))
        else:
            yield delta([2], 2, STOP, routing=routes(6, 2, 1))

    _, _, engine = await generate(script, turn(routing=True, minimum_version=policy_version(RUN, 0, 1)))
    assert [one.minimum_version.number for one in engine.requests] == [1, 2]
    assert [one[metadata.MINIMUM_VERSION] for one in engine.metadata] == ["run/0:1", "run/0:2"]
    _, _, engine = await generate(script, turn(routing=True, minimum_version=policy_version(RUN, 1, 0)))
    assert [show(one.minimum_version) for one in engine.requests] == ["run/1:0"] * 2


async def test_a_request_that_a_router_aborted_before_any_engine_saw_it_goes_on(generate):
    async def script(request, seen):
        if request.request_id == "k.0":
            yield GenerateResponse(finish_reason=ABORT)
        else:
            yield delta([7, 2], 1, STOP)

    sample, finish, _ = await generate(script)
    assert model_ids(sample) == [[7, 2]] and versions(sample) == [1] and finish == STOP


async def test_a_cancelled_turn_leaves_what_had_arrived():
    async def script(request, seen):
        yield delta([10, 11], 5)
        await asyncio.sleep(30)

    engine, trajectory = ScriptedEngine(script), Trajectory(PROMPT)
    async with serve(engine) as at, open_channel(at.address) as channel:
        running = asyncio.create_task(Generator(channel).turn(trajectory, turn()))
        await until(lambda: engine.running > 0)
        await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: engine.running == 0)
    assert model_ids(trajectory.sample("s")) == [[10, 11]]
    assert trajectory.sample("s").segments[1].generation.finish_reason == ABORT
