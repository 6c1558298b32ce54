"""Reference numbers of the papers' formulas."""

import dataclasses

import numpy as np
import pytest
import torch
from batches import advantages, evaluate, one_token_batch, streams, toy

from vime_trainer import algorithms
from vime_trainer.algorithms import (
    AlgorithmSettings,
    RolloutBatch,
    Streams,
    clipped,
    correction_weights,
    get_algorithm,
    kl_terms,
    overlong_penalty,
    token_weights,
)

REWARDS = [1, 0, 0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "extra", "high", "low"),
    [
        ("grpo", {}, 1.207612, -0.724567),
        ("dr_grpo", {"constant_length": 8}, 0.625, -0.375),
        ("rloo", {}, 0.714286, -0.428571),
        ("dapo", {}, 1.207612, -0.724567),
        ("gspo", {}, 1.207612, -0.724567),
        ("cispo", {}, 1.207612, -0.724567),
    ],
)
def test_group_advantages(name, extra, high, low):
    values = advantages(name, one_token_batch(REWARDS), **extra)
    np.testing.assert_allclose(values, np.where(np.array(REWARDS) == 1, high, low), atol=1e-6)


def test_group_statistics_use_the_sample_standard_deviation():
    statistics = algorithms.group_statistics(one_token_batch(REWARDS))
    assert statistics.mean[0] == 0.375
    assert statistics.std[0] == pytest.approx(0.517549, abs=1e-6)


def test_the_deviation_is_of_the_sample_and_epsilon_is_added_to_it():
    batch = one_token_batch(REWARDS)
    std = algorithms.group_statistics(batch).std[0]
    assert std * np.sqrt(7 / 8) == pytest.approx(0.484123, abs=1e-6)
    found = algorithms.centred(batch, scale_by_std=True, epsilon=0.0)
    assert found[[0, 1]].tolist() == pytest.approx([1.207615, -0.724569], abs=1e-6)
    # What the deviation of the population would give.
    assert (found[[0, 1]] * np.sqrt(8 / 7)).tolist() == pytest.approx([1.290994, -0.774597], abs=1e-6)


def test_sums_and_means_over_a_sequence():
    given, values = streams([4]), torch.tensor([0.1, -0.2, 0.3, 0.0])
    assert given.sequence_sum(values).exp().item() == pytest.approx(1.221403, abs=1e-6)
    assert given.sequence_mean(values).exp().item() == pytest.approx(1.051271, abs=1e-6)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.0, 1e30])
@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo"])
def test_equal_rewards_have_advantage_exactly_zero(name, value):
    extra = {"constant_length": 4} if name == "dr_grpo" else {}
    assert (advantages(name, one_token_batch([value] * 8), **extra) == 0).all()


def test_one_different_reward_keeps_the_whole_group():
    values = advantages("grpo", one_token_batch([0] + [0.95] * 7))
    assert (values != 0).all()
    assert values[0] < 0 < values[1]


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "gspo", "cispo", "dapo"])
def test_a_group_of_one_is_refused(name):
    extra = {"constant_length": 4} if name == "dr_grpo" else {}
    with pytest.raises(ValueError, match="group_size: 1 rollout"):
        advantages(name, one_token_batch([1.0], group_size=1), **extra)


def test_unusable_rollouts_are_neither_in_the_baseline_nor_in_the_gradient():
    batch = one_token_batch([1, 0, 1, 100], usable=[True, True, True, False])
    with_failure = advantages("grpo", batch)
    without = advantages("grpo", one_token_batch([1, 0, 1]))
    np.testing.assert_array_equal(with_failure[:3], without)
    assert with_failure[3] == 0


def test_a_group_with_one_usable_rollout_has_no_baseline():
    batch = one_token_batch([1, 0, 1], groups=[0, 0, 1], usable=[True, False, True], group_size=2)
    assert (advantages("grpo", batch) == 0).all()


def test_fan_out_samples_count_once_in_the_baseline():
    single = one_token_batch([1, 0], group_size=2)
    fan_out = dataclasses.replace(
        single, sample_rollouts=np.array([0, 0, 0, 1]), lengths=np.array([1, 2, 3, 2]), mask=np.ones(8, bool)
    )
    values = advantages("grpo", fan_out)
    first, second = advantages("grpo", single)
    assert (values[:6] == first).all() and (values[6:] == second).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"), [(1.5, 1, 1.2), (1.5, -1, -1.5), (0.5, 1, 0.5), (0.5, -1, -0.8)]
)
def test_ppo_clip(ratio, advantage, expected):
    loss, _ = clipped(torch.tensor([ratio]), torch.tensor([float(advantage)]), 0.2, 0.2)
    assert -loss.item() == pytest.approx(expected)


def test_dual_clip_bounds_negative_advantages():
    loss, cut = clipped(torch.tensor([10.0, 10.0]), torch.tensor([-1.0, 1.0]), 0.2, 0.2, dual=3.0)
    assert (-loss).tolist() == pytest.approx([-3.0, 1.2])
    assert cut.all()


RHO = [0.4, 0.7, 1.5, 3, 6]


@pytest.mark.parametrize(
    ("name", "bounds", "expected"),
    [
        ("tis", {}, [0.4, 0.7, 1.5, 2, 2]),
        ("mis", {}, [0.4, 0.7, 1.5, 0, 0]),
        ("icepop", {}, [0, 0.7, 1.5, 3, 0]),
        ("tis_sequence", {}, [2.0] * 5),
        ("mis_sequence", {"high": 8.0}, [0.4 * 0.7 * 1.5 * 3 * 6] * 5),
        ("mis_sequence", {}, [0.0] * 5),
        ("geometric", {"low": 1.4, "high": 1.6}, [1.0] * 5),
        ("geometric", {}, [0.0] * 5),
    ],
)
def test_corrections(name, bounds, expected):
    weights = correction_weights(name, torch.log(torch.tensor(RHO)), torch.zeros(5), streams([5]), **bounds)
    assert weights.tolist() == pytest.approx(expected, rel=1e-5)
    assert not weights.requires_grad


def test_no_correction_has_no_weights():
    assert correction_weights("none", torch.zeros(1), torch.zeros(1), streams([1])) is None


def test_masked_tokens_do_not_enter_sequence_corrections():
    kept = streams([3], mask=[True, True, False])
    log_rho = torch.tensor([0.1, 0.2, float("nan")])
    weights = correction_weights("tis_sequence", log_rho, torch.zeros(3), kept)
    assert weights.tolist() == pytest.approx([np.exp(0.3)] * 2 + [1.0], rel=1e-6)


def test_gspo_ratio_is_the_geometric_mean():
    algorithm, settings = get_algorithm("gspo"), AlgorithmSettings(name="gspo", clip_low=0.2, clip_high=0.2)
    old = torch.zeros(4)
    given = streams([4], advantages=[1.0] * 4, old_logprobs=old)
    terms = algorithm.loss(torch.tensor([0.1, -0.2, 0.3, 0.0]), torch.zeros(4), given, settings)
    assert (-terms.loss).tolist() == pytest.approx([1.051271] * 4, abs=1e-6)


def test_cispo_gives_every_token_its_gradient():
    algorithm, settings = get_algorithm("cispo"), AlgorithmSettings(name="cispo")
    logprobs = torch.tensor([0.0, 3.0], requires_grad=True)
    given = streams([2], advantages=[1.0, 2.0], old_logprobs=[0.0, 0.0])
    algorithm.loss(logprobs, torch.zeros(2), given, settings).loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.0, -12.0])  # the second ratio, e^3, is clipped to 6


def test_kl_estimators():
    logprobs, reference = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -0.5])
    assert kl_terms(logprobs, reference, "k1").tolist() == pytest.approx([0.5, -0.5])
    assert kl_terms(logprobs, reference, "k2").tolist() == pytest.approx([0.125, 0.125])
    assert kl_terms(logprobs, reference, "k3").tolist() == pytest.approx([0.106531, 0.148721], abs=1e-6)


def test_overlong_penalty():
    values = overlong_penalty(np.array([100, 16384, 18432, 20480, 20481, 99999]), 20480, 4096)
    assert values.tolist() == [0, 0, -0.5, -1, -1, -1]


def two_and_six():
    return RolloutBatch(
        rewards=np.array([1.0, 0.0]),
        groups=np.zeros(2, np.int64),
        usable=np.ones(2, bool),
        truncated=np.zeros(2, bool),
        sample_rollouts=np.arange(2),
        lengths=np.array([2, 6]),
        mask=np.ones(8, bool),
        group_ids=("g",),
        group_size=2,
    )


@pytest.mark.parametrize(("aggregation", "expected"), [("token", 0.625), ("sequence", 0.75), ("constant", 0.3125)])
def test_aggregation(aggregation, expected):
    weights = token_weights(two_and_six(), aggregation, constant_length=8)
    assert (weights * np.array([1, 1] + [0.5] * 6)).sum() == pytest.approx(expected)


def test_sequence_aggregation_weighs_rollouts_not_samples():
    fan_out = dataclasses.replace(two_and_six(), sample_rollouts=np.array([0, 0, 1]), lengths=np.array([1, 1, 6]))
    np.testing.assert_array_equal(token_weights(fan_out, "sequence"), token_weights(two_and_six(), "sequence"))


def test_rollouts_without_trainable_tokens_are_not_in_the_denominator():
    mask = np.array([True, True] + [False] * 6)
    weights = token_weights(dataclasses.replace(two_and_six(), mask=mask), "sequence")
    assert weights.tolist() == [0.5, 0.5] + [0.0] * 6
    nothing = dataclasses.replace(two_and_six(), mask=np.zeros(8, bool))
    for aggregation in algorithms.AGGREGATIONS:
        assert (token_weights(nothing, aggregation, constant_length=8) == 0).all()


@pytest.mark.parametrize("jump", [100.0, -100.0])
def test_a_huge_log_ratio_stays_finite_and_is_counted(jump):
    logprobs = torch.tensor([-1.0, -1.0 + jump, -1.0], requires_grad=True)
    result = evaluate(logprobs, toy(), kl={"coefficient": 0.1})
    result.loss.backward()
    assert torch.isfinite(result.loss) and torch.isfinite(logprobs.grad).all()
    assert result.metrics["ratio_limit_fraction"].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token", "cispo", "dppo"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_masked_positions_may_hold_anything(bad, name):
    mask = [True, False, True]
    clean = {"advantages": [1.0, 0.0, 0.5]}
    given = dataclasses.replace(toy(**clean), mask=torch.tensor(mask))
    reference = evaluate(torch.tensor([-0.5, 0.0, -1.4]), given, name=name)
    logprobs = torch.tensor([-0.5, bad, -1.4], requires_grad=True)
    result = evaluate(logprobs, given, name=name)
    result.loss.backward()
    assert result.loss.item() == reference.loss.item()
    assert torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(values[[0, 2]]).all() for values in result.metrics.values())


def test_on_policy_ratio_is_exactly_one():
    given = Streams(torch.ones(3, dtype=torch.bool), torch.tensor([0, 3]), dict(toy().values))
    del given.values["old_logprobs"]
    logprobs = torch.tensor([-0.5, -0.6, -1.4], requires_grad=True)
    result = evaluate(logprobs, given)
    assert (result.metrics["ratio"] == 1).all()
    assert (result.metrics["clip_fraction"] == 0).all()


def test_metrics_are_copies():
    logprobs = torch.tensor([-0.5, -0.6, -1.4])
    metrics = evaluate(logprobs, toy(), kl={"coefficient": 0.1}).metrics
    before = {name: values.clone() for name, values in metrics.items()}
    logprobs.zero_()
    for name, values in metrics.items():
        assert torch.equal(values, before[name]), name
