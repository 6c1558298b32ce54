import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_proto.errors import ContractError
from vime_router import Candidate, RouterSettings, make_policy, policy_names


def run(policy, count, tokens=None, engines=4):
    """Loads after ``count`` requests that never end."""
    load = {f"e{number}": [0, 0] for number in range(engines)}
    for number in range(count):
        size = tokens[number] if tokens else 1
        chosen = policy.choose([Candidate(key, *value) for key, value in load.items()], size)
        load[chosen.engine_id][0] += 1
        load[chosen.engine_id][1] += size
    return load


def test_names():
    assert policy_names() == ["least_outstanding_tokens", "round_robin"]


@pytest.mark.parametrize("name", ["round_robbin", "least-outstanding-tokens"])
def test_an_unknown_policy_is_refused_with_the_nearest_name(name):
    right = name.replace("robbin", "robin").replace("-", "_")
    with pytest.raises(ContractError, match=f"unknown policy '{name}'; did you mean '{right}'"):
        make_policy(name, random.Random(0))
    with pytest.raises(ValueError, match=f"did you mean '{right}'"):
        RouterSettings(policy=name)


def test_round_robin_takes_turns_even_when_engines_come_and_go():
    policy = make_policy("round_robin", random.Random(0))
    a, b, c = (Candidate(name) for name in "abc")
    turns = [policy.choose(those, 1).engine_id for those in ([a, b, c], [a, b, c], [a, c], [a, b, c], [b, c], [b])]
    assert turns == ["a", "b", "c", "a", "b", "b"]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.integers(0, 99))
def test_least_outstanding_tokens_spreads_by_size(sizes, seed):
    load = run(make_policy("least_outstanding_tokens", random.Random(seed)), len(sizes), sizes)
    tokens = [value[1] for value in load.values()]
    assert max(tokens) - min(tokens) <= max(sizes)


def test_least_outstanding_tokens_falls_back_to_requests_and_breaks_ties_at_random():
    policy = make_policy("least_outstanding_tokens", random.Random(0))
    assert policy.choose([Candidate("a", 3, 0), Candidate("b", 1, 0)], 0).engine_id == "b"
    first = {policy.choose([Candidate("a"), Candidate("b")], 1).engine_id for _ in range(50)}
    assert first == {"a", "b"}
