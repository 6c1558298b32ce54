"""A refresh that meets an engine on its way out still answers."""

import asyncio

import grpc
import pytest

from vime_router._engines import Engines


class _Fleet:
    members = {"a": "a", "b": "b"}


async def _refresh(results):
    engines = Engines.__new__(Engines)
    engines._fleet = _Fleet()

    async def check(member):
        result = results[member]
        if isinstance(result, BaseException):
            raise result
        return result

    engines.check = check
    await engines.refresh()


@pytest.mark.parametrize("leaving", [asyncio.CancelledError(), grpc.aio.UsageError("Channel is closed.")])
async def test_an_engine_that_leaves_during_a_refresh_does_not_take_the_answer_along(leaving):
    await asyncio.wait_for(_refresh({"a": leaving, "b": True}), 30)


async def test_other_faults_of_a_check_are_not_hidden():
    with pytest.raises(ZeroDivisionError):
        await _refresh({"a": ZeroDivisionError(), "b": True})
