"""Errors on their way across a boundary."""

import grpc
import pytest

from vime_proto.errors import ContractError, StatusError, nearest, to_status


def test_a_contract_error_names_every_field():
    error = ContractError("a.b", "is wrong", [("c", "too")])
    assert str(error) == "a.b: is wrong; c: too"
    assert error.under("x").violations == [("x.a.b", "is wrong"), ("x.c", "too")]


def test_a_status_carries_violations_and_delay():
    status = to_status(StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [("f", "d")], retry_after=1.5))
    assert status.code == 8 and len(status.details) == 2
    assert to_status(ContractError("f", "d")).code == 3


@pytest.mark.parametrize(("name", "hint"), [("exat", "did you mean 'exact'?"), ("zzz", "valid: exact, math")])
def test_unknown_names_come_with_the_nearest_valid_one(name, hint):
    message = nearest(name, ["math", "exact"], "reward")
    assert message.startswith(f"unknown reward {name!r};") and hint in message
    assert nearest(name, []).endswith("none")
