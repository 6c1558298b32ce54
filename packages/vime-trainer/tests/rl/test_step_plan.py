"""Shares of data ranks and their micro-batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make import answer, group, index_of, prompt, rollout, sample

from vime_trainer.batch import BatchSettings, TokenCost, plan_shares, plan_step, share_samples
from vime_trainer.models import Architecture
from vime_trainer.rl._plan import critic_steps, plan_batch

LENGTHS = st.lists(st.integers(1, 60), max_size=40)
COST = TokenCost(linear=10.0, quadratic=1.0)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 80), st.sampled_from(["packed", "padded"]), st.integers(1, 4))
def test_every_sample_is_planned_once_and_all_ranks_have_equally_many(lengths, ranks, budget, layout, multiple):
    plan = plan_step(lengths, range(len(lengths)), ranks, budget, layout, multiple, COST)
    assert len(plan) == ranks
    assert sorted(s for rank in plan for micro in rank for s in micro) == list(range(len(lengths)))
    counts = {len(rank) for rank in plan}
    assert len(counts) == 1 and counts.pop() % multiple == 0
    for rank in plan:
        prices = [COST.of([lengths[s] for s in micro]).sum() for micro in rank]
        assert prices == sorted(prices, reverse=True)
        for micro in rank:
            width = [lengths[s] for s in micro]
            total = max(width, default=0) * len(width) if layout == "padded" else sum(width)
            assert total <= budget or len(micro) == 1


@given(LENGTHS, st.integers(1, 5))
def test_shares_balance_cost(lengths, ranks):
    totals = [
        COST.of([lengths[s] for s in share]).sum() for share in share_samples(lengths, range(len(lengths)), ranks, COST)
    ]
    dearest = COST.of(lengths).max() if lengths else 0.0
    assert max(totals) - min(totals) <= dearest + 1e-9


@given(LENGTHS, st.integers(1, 5))
def test_a_rank_is_left_out_only_when_there_are_fewer_samples(lengths, ranks):
    shares = share_samples(lengths, range(len(lengths)), ranks)
    assert sum(1 for share in shares if share) == min(ranks, len(lengths))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=24), st.integers(1, 3), st.integers(1, 6), st.integers(1, 2))
def test_the_critics_steps_take_every_sample_once_from_the_rank_that_has_it(lengths, ranks, parts, multiple):
    groups = [
        group(
            f"g{at}",
            *(rollout(f"{at}.{i}", 1.0, sample(f"{at}.{i}", prompt([1]), answer([1] * n))) for i, n in enumerate(few)),
        )
        for at, few in enumerate(lengths[i : i + 3] for i in range(0, len(lengths), 3))
    ]
    index, settings = index_of(groups), BatchSettings(token_budget=70, optimizer_steps=2)
    plan = plan_batch(index, settings, ranks, multiple)
    steps = critic_steps(index, plan, settings, parts)
    assert len(steps) == min(parts, len(groups))
    for rank, owned in enumerate(plan.owned):
        assert sorted(s for _, cut in steps for micro in cut[rank] for s in micro) == owned
    for part, cut in steps:
        assert len({len(micros) for micros in cut}) == 1 and len(cut[0]) % multiple == 0
        assert all(part[index.sample_rollouts[s]] for micros in cut for micro in micros for s in micro)


def test_attention_counts_in_the_balance():
    # Equal tokens: one long sequence costs more than four short ones.
    lengths = [400, 100, 100, 100, 100, 100, 100, 100, 100]
    by_tokens = share_samples(lengths, range(9), 2)
    by_flops = share_samples(lengths, range(9), 2, TokenCost(1.0, 0.01))
    assert [sum(lengths[s] for s in share) for share in by_tokens] == [600, 600]
    assert by_flops[0] == [0]


def test_extra_micro_batches_split_the_dearest_before_they_stay_empty():
    assert plan_shares([5, 5, 5, 5, 9], [[0, 1, 2, 3], [4]], 10) == [[[0, 1], [2, 3]], [[4], []]]
    assert plan_shares([9, 5, 5, 5], [[0, 1], [2, 3]], 10) == [[[0], [1]], [[2], [3]]]
    assert plan_shares([3, 3], [[0, 1]], 10, multiple=4) == [[[0], [1], [], []]]
    assert plan_shares([], [[], []], 10, multiple=2) == [[], []]


def test_only_the_samples_of_the_step_are_planned():
    plan = plan_step([3, 4, 5, 6], [1, 3], 2, 100)
    assert sorted(s for rank in plan for micro in rank for s in micro) == [1, 3]


def test_a_sample_beyond_the_budget_goes_alone():
    plan = plan_step([50, 3, 4], range(3), 1, 10)
    assert plan == [[[0], [1, 2]]]


def architecture(**changes):
    sizes = dict(layers=2, hidden=8, vocab=32, heads=4, kv_heads=2, head_dim=4, ffn=16, tied=True, norm_eps=1e-6)
    return Architecture(**sizes, rope_theta=1e4, max_positions=64, init_std=0.02, **changes)


def test_cost_of_an_architecture():
    dense = TokenCost.of_architecture(architecture())
    attention, ffn = 8 * 4 * (4 + 2 + 2) + 4 * 4 * 8, 3 * 8 * 16
    assert dense.linear == 2 * 2 * (attention + ffn)
    # Scores and their sum over values: 2 x 2 x heads x head_dim a pair, half of the pairs, two layers.
    assert dense.quadratic == 2 * 2 * 2 * 4 * 4 / 2
    moe = TokenCost.of_architecture(
        architecture(experts=4, top_k=2, expert_ffn=8, shared_ffn=8, moe_layers=frozenset({1}))
    )
    assert moe.linear == 2 * (2 * attention + ffn + 3 * 8 * (2 * 8 + 8) + 8 * 4)
    np.testing.assert_allclose(
        dense.of([1, 3]), [dense.linear + dense.quadratic, 3 * dense.linear + 9 * dense.quadratic]
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_plan_follows_from_the_lengths_alone(ranks):
    lengths = np.random.default_rng(0).integers(1, 50, 30).tolist()
    assert plan_step(lengths, range(30), ranks, 64) == plan_step(np.asarray(lengths), list(range(30)), ranks, 64)
