"""Answers while they grow: versions, replays, faults. No engine."""

import asyncio

import numpy as np
import pytest

from vime_proto.errors import StatusError
from vime_proto.version import policy_version
from vime_rollout.engine._generation import Generation, Registry
from vime_rollout.engine._types import Output


class Versions:
    def __init__(self):
        self.now = policy_version("run", 0, 1)

    def __call__(self):
        return self.now


def make(versions=None, request_id="r", tokens=100, seconds=60.0, on_end=lambda _: None):
    return Generation(request_id, b"", [1, 2], versions or Versions(), tokens, seconds, on_end)


def out(*tokens, finish=None, logprobs=None, **more):
    return Output(
        tokens=list(tokens), logprobs=[-0.5] * len(tokens) if logprobs is None else logprobs, finish=finish, **more
    )


async def read(generation):
    return [part async for part in generation.parts()]


async def test_each_part_has_one_version_however_late_it_is_read():
    versions = Versions()
    generation = make(versions)
    generation.put(out(5, 6))
    versions.now = policy_version("run", 0, 2)
    generation.put(out(7))
    generation.put(out(8, finish="length"))
    parts = await read(generation)
    assert [(start, stop, version.number, last) for start, stop, version, last in parts] == [
        (0, 2, 1, False),
        (2, 4, 2, True),
    ]


async def test_an_answer_without_tokens_states_the_version():
    generation = make()
    generation.end("abort")
    ((start, stop, version, last),) = await read(generation)
    assert (start, stop, version.number, last) == (0, 0, 1, True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
async def test_a_non_finite_logprob_fails_the_request_by_name(bad):
    ended = []
    generation = make(request_id="broken-7", on_end=ended.append)
    generation.put(out(5))
    generation.put(out(9, logprobs=[bad]))
    with pytest.raises(StatusError, match=r"'broken-7'.*token 1 \(id 9\).*run/0:1"):
        await read(generation)
    assert ended == [generation]
    generation.put(out(10, finish="length"))  # ignored
    assert generation.finish is None


async def test_readers_are_woken_by_amount_by_age_and_by_the_end():
    generation = make(tokens=3, seconds=0.05)
    seen = []

    async def reader():
        async for start, stop, _, last in generation.parts():
            seen.append((start, stop, last))

    task = asyncio.ensure_future(reader())
    await asyncio.sleep(0)
    generation.put(out(1, 2, 3))
    await asyncio.sleep(0.01)
    assert seen == [(0, 3, False)]
    generation.put(out(4))
    await asyncio.sleep(0.01)
    assert len(seen) == 1
    await asyncio.sleep(0.1)
    assert seen[1:] == [(3, 4, False)]
    generation.put(out(5, finish="stop"))
    await task
    assert seen[2:] == [(4, 5, True)]


def test_the_registry_is_bounded_by_number_and_by_tokens():
    registry = Registry(capacity=3, tokens=100)
    for number in range(5):
        one = make(request_id=str(number), on_end=registry.ended)
        registry.add(one)
        assert registry.running == [one]
        one.put(out(1, finish="length"))
    assert [registry.get(str(number)) is not None for number in range(5)] == [False, False, True, True, True]
    large = make(request_id="large", on_end=registry.ended)
    registry.add(large)
    large.put(out(*range(97), finish="length"))
    assert registry.get("large") is large and registry.get("4") is None


def test_failed_and_dropped_answers_are_not_kept():
    registry = Registry(capacity=3, tokens=100)
    for name in ("failed", "dropped"):
        one = make(request_id=name, on_end=registry.ended)
        registry.add(one)
        if name == "failed":
            one.fail(StatusError(None, "x")) if False else one.put(RuntimeError("gone"))
        else:
            one.dropped = True
            one.end("abort")
        assert registry.get(name) is None and not registry.running
