"""Reference numbers and invariants of advantages on tokens: GAE, REINFORCE++, KL within the reward, distillation."""

import dataclasses

import numpy as np
import pytest
from batches import advantages, one_token_batch, rollout_batch

from vime_trainer.algorithms import (
    AlgorithmSettings,
    advantage_streams,
    gae,
    get_algorithm,
    kl_penalty,
    normalised,
    required_columns,
    token_rewards,
)

PPO = {"name": "ppo", "gae_lambda": 0.95, "normalise_advantages": False}


def streams_of(batch, **settings):
    settings = AlgorithmSettings(**settings)
    return advantage_streams(get_algorithm(settings.name), batch, settings)


def test_gae():
    batch = rollout_batch([3])
    values, returns = gae(batch, np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.6, 0.7]), gamma=1.0, lam=0.95)
    np.testing.assert_allclose(values, [0.46575, 0.385, 0.3], atol=1e-12)
    np.testing.assert_allclose(returns, [0.96575, 0.985, 1.0], atol=1e-12)


def test_ppo_puts_the_reward_on_the_last_trainable_token():
    batch = rollout_batch([3], rewards=[1.0], values=[0.5, 0.6, 0.7])
    found = streams_of(batch, **PPO)
    np.testing.assert_allclose(found["advantages"], [0.46575, 0.385, 0.3], atol=1e-6)
    np.testing.assert_allclose(found["returns"], [0.96575, 0.985, 1.0], atol=1e-6)


def test_gae_steps_over_masked_tokens_and_from_sample_to_sample():
    # One rollout of three tokens that count, with a tool's answer between and a second sample; another rollout in between.
    mask = [False, True, True, False, False] + [False, True] + [False, True, False]
    bad = float("nan")
    values = [bad, 0.5, 0.6, bad, bad] + [bad, 0.25] + [bad, 0.7, bad]
    batch = rollout_batch([5, 2, 3], mask, rewards=[1.0, 0.5], sample_rollouts=[0, 1, 0], values=values)
    found = streams_of(batch, **PPO)
    places = [1, 2, 8]
    np.testing.assert_allclose(found["advantages"][places], [0.46575, 0.385, 0.3], atol=1e-6)
    np.testing.assert_allclose(found["returns"][places], [0.96575, 0.985, 1.0], atol=1e-6)
    assert found["advantages"][6] == pytest.approx(0.25) and found["returns"][6] == pytest.approx(0.5)
    for stream in found.values():
        assert (stream[~batch.mask] == 0).all() and stream.dtype == np.float32


def test_gae_discounts():
    batch = rollout_batch([2])
    values, _ = gae(batch, np.array([1.0, 2.0]), np.array([0.5, 0.25]), gamma=0.5, lam=0.5)
    # delta = [1 + 0.125 - 0.5, 2 - 0.25]
    np.testing.assert_allclose(values, [0.625 + 0.25 * 1.75, 1.75])


def test_gae_of_a_rollout_that_goes_on():
    batch = rollout_batch([3])
    values = np.array([0.5, 0.6, 0.7])
    advantages, returns = gae(batch, np.zeros(3), values, gamma=1.0, lam=0.95, end_values=np.array([0.8]))
    # delta = [.6 - .5, .7 - .6, .8 - .7]
    np.testing.assert_allclose(advantages, [0.1 + 0.95 * 0.195, 0.1 + 0.95 * 0.1, 0.1], atol=1e-12)
    np.testing.assert_allclose(returns, [0.78525, 0.795, 0.8], atol=1e-12)
    advantages, _ = gae(rollout_batch([2]), np.array([0.0, 0.2]), values[:2], 0.9, 0.5, np.array([0.8]))
    # delta = [.9 x .6 - .5, .2 + .9 x .8 - .6]
    np.testing.assert_allclose(advantages, [0.04 + 0.45 * 0.32, 0.32], atol=1e-12)


def test_ppo_takes_the_critics_value_of_a_truncated_rollouts_end_only_where_it_is_told_to():
    mask = [True, True, False] + [True, True, False] + [False] + [False, True]
    values = [0.5, 0.6, 9.0] + [0.5, 0.6, 9.0] + [9.0] + [9.0, 0.7]
    batch = rollout_batch([3, 3, 1, 2], mask, [0.0, 1.0, 0.0], sample_rollouts=[0, 1, 2, 0], values=values)
    batch = dataclasses.replace(
        batch, truncated=np.array([True, False, True]), end_values=np.array([0.8, 0.0, 0.0], np.float32)
    )
    on = streams_of(batch, **PPO, bootstrap_truncated=True)
    np.testing.assert_allclose(on["advantages"][[0, 1, 8]], [0.28525, 0.195, 0.1], atol=1e-6)
    np.testing.assert_allclose(on["returns"][[0, 1, 8]], [0.78525, 0.795, 0.8], atol=1e-6)
    # The limit is the end: nothing is earned after it.
    off = streams_of(batch, **PPO)
    np.testing.assert_allclose(off["returns"][8], 0.0, atol=1e-6)
    np.testing.assert_allclose(off["advantages"][8], -0.7, atol=1e-6)
    for name in ("advantages", "returns"):
        np.testing.assert_array_equal(on[name][3:6], off[name][3:6])
    with pytest.raises(ValueError, match="algorithm ppo: needs end_values of the batch"):
        streams_of(dataclasses.replace(batch, end_values=None), **PPO, bootstrap_truncated=True)


def test_with_lambda_one_and_equal_values_every_turn_has_the_same_advantage():
    mask = [False, True, True, True, False, True]
    batch = rollout_batch([6], mask, rewards=[1.0], values=np.full(6, 0.25))
    found = streams_of(batch, name="ppo", normalise_advantages=False)["advantages"]
    np.testing.assert_allclose(found[mask], 0.75)


def test_ppo_works_on_rollouts_without_a_trainable_token():
    batch = rollout_batch([2, 2], [False, False, False, True], rewards=[5.0, 1.0], values=np.zeros(4))
    found = streams_of(batch, name="ppo", normalise_advantages=False)
    assert found["advantages"].tolist() == [0, 0, 0, 1]
    nothing = dataclasses.replace(batch, mask=np.zeros(4, bool))
    assert not streams_of(nothing, name="ppo")["advantages"].any()


def test_normalisation_is_over_all_tokens():
    values = np.arange(15.0).reshape(3, 5) ** 2
    batch = rollout_batch([5, 5, 5])
    found = normalised(batch, values.ravel())
    expected = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(found, expected.ravel())
    assert found[0] == pytest.approx(-1.042300, abs=1e-5) and found[-1] == pytest.approx(1.976778, abs=1e-5)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e30])
def test_normalisation_of_equal_values_is_exactly_zero(value):
    assert (normalised(rollout_batch([7]), np.full(7, value)) == 0).all()
    assert (normalised(rollout_batch([1]), np.full(1, value)) == 0).all()


def test_normalisation_does_not_see_masked_values():
    batch = rollout_batch([4], [True, False, True, True])
    found = normalised(batch, np.array([1.0, np.nan, 2.0, 4.0]))
    np.testing.assert_array_equal(found[[0, 2, 3]], normalised(rollout_batch([3]), np.array([1.0, 2.0, 4.0])))
    assert found[1] == 0


def reinforce_batch(old):
    mask = [False, True, True, False, True, False, True]
    reference = np.full(7, -1.0)
    return rollout_batch([5, 2], mask, rewards=[1.0, 0.0], old=old, reference=reference, engine=old)


def test_reinforce_plus_plus():
    batch = reinforce_batch([9.0, -0.5, -1.25, 9.0, -0.75, 9.0, -1.5])
    found = advantages("reinforce_plus_plus", batch, kl={"coefficient": 0.1})
    # log(old / reference) = .5, -.25, .25 in the first rollout, -.5 in the second.
    raw = np.array([1 - 0.1 * 0.5, 1 - 0.1 * 0.0, 1 - 0.1 * 0.25, 0 + 0.1 * 0.5])
    expected = (raw - raw.mean()) / (raw.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(found[batch.mask], expected, atol=1e-6)


def test_reinforce_plus_plus_without_kl_gives_a_rollout_one_advantage():
    batch = one_token_batch([1, 0, 0, 1, 1, 0, 0, 0])
    found = advantages("reinforce_plus_plus", batch)
    np.testing.assert_allclose(found, np.where(batch.rewards == 1, 1.207612, -0.724567), atol=1e-6)
    assert not get_algorithm("reinforce_plus_plus").needs_group


def test_reinforce_plus_plus_baseline():
    batch = rollout_batch([1, 3, 1, 1], rewards=[1, 0, 3, 1], groups=[0, 0, 1, 1])
    found = advantages("reinforce_plus_plus_baseline", batch)
    raw = np.array([0.5, -0.5, -0.5, -0.5, 1.0, -1.0])
    np.testing.assert_allclose(found, (raw - raw.mean()) / (raw.std(ddof=1) + 1e-6), atol=1e-6)


def test_maxrl():
    found = advantages("maxrl", one_token_batch([1, 0, 0, 1, 1, 0, 0, 0]))
    np.testing.assert_allclose(found, [0.625 / 0.375 if r else -1.0 for r in [1, 0, 0, 1, 1, 0, 0, 0]], rtol=1e-6)
    assert (advantages("maxrl", one_token_batch([0.0] * 4)) == 0).all()
    with pytest.raises(ValueError, match="group 'g0' has mean reward -0.5"):
        advantages("maxrl", one_token_batch([-1.0, 0.0]))


def test_distillation_follows_the_teacher():
    batch = rollout_batch(
        [3], [True, True, False], teacher=[-1.0, -30.0, np.nan], old=[-1.5, -1.0, 0.0], engine=[0.0] * 3
    )
    assert streams_of(batch, name="distillation")["advantages"].tolist() == [0.5, -20.0, 0.0]
    without_old = dataclasses.replace(
        batch, logprobs={"teacher": batch.logprobs["teacher"], "engine": batch.logprobs["old"]}
    )
    found = streams_of(without_old, name="distillation", old_policy="engine")["advantages"]
    assert found.tolist() == [0.5, -20.0, 0.0]


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", [0.5, -0.5]), ("k2", [0.125] * 2), ("k3", [0.106531, 0.148721])]
)
def test_kl_in_reward(estimator, expected):
    batch = rollout_batch([2], rewards=[1.0], old=[-1.0, -1.0], reference=[-1.5, -0.5], engine=[0, 0])
    settings = AlgorithmSettings(name="ppo", kl={"coefficient": 2.0, "place": "reward", "estimator": estimator})
    np.testing.assert_allclose(kl_penalty(batch, settings), 2 * np.array(expected), atol=1e-6)
    np.testing.assert_allclose(token_rewards(batch, settings), np.array([0.0, 1.0]) - 2 * np.array(expected), atol=1e-6)
    in_loss = AlgorithmSettings(name="ppo", kl={"coefficient": 2.0, "place": "loss"})
    assert not kl_penalty(batch, in_loss).any()


@pytest.mark.parametrize("name", ["grpo", "ppo", "reinforce_plus_plus", "rloo"])
def test_the_kl_of_masked_tokens_changes_nothing(name):
    mask = [True, True, False, True, False, True]
    old, reference = np.linspace(-2, -1, 6), np.full(6, -1.2)
    options = {"name": name, "kl": {"coefficient": 0.1, "place": "reward"}}
    found = []
    for noise in (0.0, 5.0, np.nan):
        moved = np.where(mask, old, old + noise)
        batch = rollout_batch([3, 3], mask, [1.0, 0.0], old=moved, reference=reference, engine=old, values=np.zeros(6))
        found.append(streams_of(batch, **options))
    for other in found[1:]:
        for key, stream in found[0].items():
            np.testing.assert_array_equal(stream, other[key])


def test_group_estimators_see_the_reward_less_the_rollouts_kl():
    old = [-1.0, -0.5, -1.0, -1.0]
    batch = rollout_batch([2, 2], rewards=[1.0, 1.0], old=old, reference=[-1.0] * 4, engine=old)
    found = streams_of(batch, name="rloo", kl={"coefficient": 0.5, "place": "reward", "estimator": "k1"})["advantages"]
    np.testing.assert_allclose(found, [-0.25, -0.25, 0.25, 0.25])
    assert (streams_of(batch, name="rloo", kl={"coefficient": 0.5})["advantages"] == 0).all()


def test_what_an_algorithm_needs():
    def needs(steps=1, **settings):
        made = AlgorithmSettings(**settings)
        return set(required_columns(get_algorithm(made.name), made, steps))

    assert needs() == set()
    assert needs(2) == {"old"}
    assert needs(2, old_policy="engine") == set()
    assert needs(2, old_policy="linear") == set()
    assert needs(name="ppo") == {"values"}
    assert needs(name="distillation") == {"old", "teacher"}
    assert needs(kl={"coefficient": 0.1}) == {"reference"}
    assert needs(kl={"coefficient": 0.1, "place": "reward"}) == {"reference", "old"}
    assert needs(correction_normalise=True) == {"old"}


def test_missing_columns_are_named():
    with pytest.raises(ValueError, match="algorithm ppo: needs values"):
        streams_of(rollout_batch([2]), name="ppo")
    with pytest.raises(ValueError, match="algorithm distillation: needs old, teacher"):
        streams_of(rollout_batch([2]), name="distillation")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "no stream 'advantages'"),
        ({"advantages": np.zeros(3)}, r"shape \[3\] for 2 tokens"),
        ({"advantages": np.array([0.0, np.nan])}, "nan in 'advantages' at a token of group 'g0'"),
    ],
)
def test_what_a_users_advantage_gives_is_checked(given, message):
    algorithm = dataclasses.replace(get_algorithm("grpo"), advantage=lambda batch, settings: given)
    with pytest.raises(ValueError, match=message):
        advantage_streams(algorithm, rollout_batch([2]), AlgorithmSettings())
