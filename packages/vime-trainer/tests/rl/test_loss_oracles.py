"""Reference numbers of losses and corrections beyond the clipped objective, and the table of options."""

import math

import numpy as np
import pytest
import torch
from batches import evaluate, rollout_batch, streams, toy

from vime_trainer.algorithms import (
    AlgorithmSettings,
    correction_scale,
    correction_weights,
    critic_objective,
    get_algorithm,
    kl_terms,
    proximal_alpha,
    proximal_logprobs,
    value_loss,
)
from vime_trainer.rl._figures import explained_variance

LIVE = [-0.5, -0.6, -1.4]


@pytest.mark.parametrize(
    "option",
    [
        {"clip_low": 0.01},
        {"clip_high": 0.01},
        {"clip_dual": 1.1},
        {"correction": "none"},
        {"correction": "importance"},
        {"correction": "tis_sequence"},
        {"correction": "mis"},
        {"correction": "mis_sequence"},
        {"correction": "geometric"},
        {"correction": "k3"},
        {"correction_high": 1.1},
        {"correction": "icepop", "correction_low": 0.95},
        {"old_policy": "engine"},
        {"entropy_coefficient": 0.1},
        {"kl": {"coefficient": 0.1}},
        {"sequence_mask": 0.0},
        {"name": "gspo"},
        {"name": "cispo"},
        {"name": "dppo"},
        {"loss": "plugin:loss"},
    ],
)
def test_every_option_changes_the_loss(option):
    # The engine lies above the policy on average, so that the sequence counts as far away.
    given = toy(engine_logprobs=[-2.0, -0.2, 0.0])
    logprobs = torch.tensor(LIVE)
    assert evaluate(logprobs, given, **option).loss.item() != pytest.approx(evaluate(logprobs, given).loss.item())


def test_streams_computed_over_the_batch_change_the_loss():
    logprobs = torch.tensor(LIVE)
    plain = evaluate(logprobs, toy()).loss.item()
    assert evaluate(logprobs, toy(correction_scale=[0.5] * 3)).loss.item() == pytest.approx(0.5 * plain)
    linear = toy(proximal_alpha=[0.5] * 3)
    del linear.values["old_logprobs"]
    assert evaluate(logprobs, linear, old_policy="linear").loss.item() != pytest.approx(plain)


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_the_kl_estimator_changes_loss_or_gradient(estimator):
    results = []
    for one in (estimator, "k3"):
        logprobs = torch.tensor(LIVE, requires_grad=True)
        result = evaluate(logprobs, toy(), kl={"coefficient": 0.1, "estimator": one})
        result.loss.backward()
        results.append((result.loss.item(), *logprobs.grad.tolist()))
    assert results[0] != pytest.approx(results[1])


def test_kl_within_the_reward_is_no_term_of_the_loss_but_is_measured():
    plain = evaluate(torch.tensor(LIVE), toy())
    result = evaluate(torch.tensor(LIVE), toy(), kl={"coefficient": 0.5, "place": "reward", "estimator": "k1"})
    assert result.loss.item() == plain.loss.item()
    assert result.metrics["kl"].tolist() == pytest.approx([0.6, 0.7, -0.6])


def test_a_kl_beyond_its_limit_is_counted():
    given = toy(reference_logprobs=[-1.0, -101.0, 99.0])
    result = evaluate(torch.tensor(LIVE), given, kl={"coefficient": 0.5})
    assert result.metrics["kl_limit_fraction"].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(("estimator", "value"), [("k1+", "k1"), ("k3+", "k3"), ("k2", "k2")])
def test_kl_with_the_right_gradient(estimator, value):
    reference = torch.tensor([-1.5, -0.5, -41.0])
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    terms = kl_terms(logprobs, reference, estimator)
    torch.testing.assert_close(terms, kl_terms(logprobs.detach(), reference, value))
    terms.sum().backward()
    # The gradient of k2 is log pi - log pi_ref; beyond the limit of 20 there is none.
    assert logprobs.grad.tolist() == pytest.approx([0.5, -0.5, 0.0])


def test_expected_gradient_of_the_kl():
    """Over all tokens of a distribution, E[gradient of k2] is the KL's gradient; that of k1 is zero."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64).log_softmax(0)
    exact = (logits.softmax(0) * (logits.log_softmax(0) - reference)).sum()
    expected = torch.autograd.grad(exact, logits)[0]
    for estimator, gradient in (
        ("k2", expected),
        ("k1+", expected),
        ("k3+", expected),
        ("k1", torch.zeros(3).double()),
    ):
        terms = kl_terms(logits.log_softmax(0), reference, estimator)
        found = torch.autograd.grad((logits.softmax(0).detach() * terms).sum(), logits)[0]
        torch.testing.assert_close(found, gradient, atol=1e-12, rtol=1e-9)


def test_gspo_token_has_the_value_of_gspo_and_a_gradient_per_token():
    def run(name, advantages):
        logprobs = torch.tensor([0.1, -0.2, 0.3, 0.0], requires_grad=True)
        settings = AlgorithmSettings(name=name, clip_low=0.2, clip_high=0.2)
        given = streams([4], advantages=advantages, old_logprobs=[0.0] * 4)
        terms = get_algorithm(name).loss(logprobs, torch.zeros(4), given, settings).loss
        terms.sum().backward()
        return terms.tolist(), logprobs.grad.tolist()

    values, gradient = run("gspo_token", [1.0, 0.0, 2.0, 1.0])
    assert [-v for v in values] == pytest.approx([1.051271, 0.0, 2.102542, 1.051271], abs=1e-6)
    assert [-g for g in gradient] == pytest.approx([1.051271, 0.0, 2.102542, 1.051271], abs=1e-6)
    same, even = run("gspo_token", [1.0] * 4), run("gspo", [1.0] * 4)
    assert same[0] == pytest.approx(even[0]) and same[1] == pytest.approx(even[1])


def test_dppo_drops_tokens_by_probability():
    probabilities, engine = [0.75, 0.55, 0.2, 0.45, 0.25], [0.5, 0.5, 0.5, 0.5, 0.5]
    logprobs = torch.tensor(probabilities).log().requires_grad_()
    mu = np.log(engine)
    given = streams([5], advantages=[1.0, 1.0, -1.0, -1.0, 1.0], engine_logprobs=mu, old_logprobs=mu)
    terms = get_algorithm("dppo").loss(logprobs, torch.zeros(5), given, AlgorithmSettings(name="dppo")).loss
    # The first rose, the third fell by more than 0.2; the last fell, but its advantage asks it to rise.
    assert terms.tolist() == pytest.approx([0.0, -1.1, 0.0, 0.9, -0.5], rel=1e-5)
    terms.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.1, 0.0, 0.9, -0.5], rel=1e-5)


def test_decoupled_ppo():
    """(pi_prox / mu) min(u A, clip(u) A), u = pi / pi_prox; the first factor is a constant."""
    logprobs = torch.tensor([math.log(1.5), math.log(0.5)], requires_grad=True)
    given = streams(
        [2],
        advantages=[1.0, 1.0],
        old_logprobs=[0.0, 0.0],
        engine_logprobs=[-math.log(4.0), math.log(2.0)],
        weights=[1.0] * 2,
    )
    result = evaluate(logprobs, given, name="ppo", correction="importance")
    assert -result.loss.item() == pytest.approx(4.0 * 1.2 + 0.5 * 0.5, rel=1e-6)
    result.loss.backward()
    assert [-g for g in logprobs.grad.tolist()] == pytest.approx([0.0, 0.25], rel=1e-6)


def test_log_linear_proximal_policy():
    alpha = proximal_alpha(np.array([7.0, 9.0, 10.0]), proximal=9, current=10)
    assert alpha.tolist() == pytest.approx([2 / 3, 0.0, 1.0])
    found = proximal_logprobs(torch.tensor([-2.0]), torch.tensor([-1.4]), torch.from_numpy(alpha[:1]))
    assert found.item() == pytest.approx(-1.6)
    # At the batch's first step the proximal policy is the live one.
    assert proximal_alpha(np.array([3.0, 9.0]), proximal=9, current=9).tolist() == [1.0, 1.0]


def test_the_proximal_policy_takes_no_gradient():
    logprobs = torch.tensor([-1.4], requires_grad=True)
    given = streams([1], engine_logprobs=[-2.0], proximal_alpha=[2 / 3])
    old = given.old_logprobs(logprobs)
    assert old.item() == pytest.approx(-1.6) and not old.requires_grad


RHO = [0.4, 0.7, 1.5, 3, 6]


def test_importance_weights_are_rho():
    weights = correction_weights("importance", torch.log(torch.tensor(RHO)), torch.zeros(5), streams([5]))
    assert weights.tolist() == pytest.approx(RHO, rel=1e-5)


def test_k3_rejection_is_of_whole_sequences():
    log_rho = torch.tensor([0.1, -0.1, 0.2, 0.1])
    mean = np.mean([math.exp(d) - d - 1 for d in (0.1, -0.1)])
    given = streams([2, 2])
    weights = correction_weights("k3", log_rho, torch.zeros(4), given, high=mean + 1e-6)
    assert weights.tolist() == [1, 1, 0, 0]
    assert correction_weights("k3", log_rho, torch.zeros(4), given, high=mean - 1e-6).tolist() == [0, 0, 0, 0]
    assert correction_weights("k3", torch.zeros(4), torch.zeros(4), given).tolist() == [1] * 4


@pytest.mark.parametrize("correction", ["tis", "tis_sequence", "icepop"])
def test_normalised_weights_have_mean_one_over_the_batch(correction):
    mask = np.array([True, True, False, True, True])
    old, engine = np.log(np.array([1.5, 0.7, 9.0, 1.2, 0.6])), np.zeros(5)
    batch = rollout_batch([3, 2], mask, old=old, engine=engine)
    settings = AlgorithmSettings(correction=correction, correction_normalise=True)
    scale = correction_scale(batch, settings, mask)
    weights = correction_weights(
        correction, torch.from_numpy(old), torch.from_numpy(engine), streams([3, 2], mask.tolist())
    ).numpy()
    assert (weights * scale)[mask].mean() == pytest.approx(1.0, rel=1e-6)
    assert scale[2] == 0 and len(set(scale[mask].tolist())) == 1


def test_normalisation_where_all_is_rejected_is_harmless():
    batch = rollout_batch([2], old=[3.0, 3.0], engine=[0.0, 0.0])
    settings = AlgorithmSettings(correction="mis", correction_normalise=True)
    assert correction_scale(batch, settings, batch.mask).tolist() == [1.0, 1.0]
    assert correction_scale(batch, settings, np.zeros(2, bool)).tolist() == [0.0, 0.0]


def test_off_policy_sequence_mask_drops_what_is_far_and_bad():
    given = streams(
        [2, 2, 2],
        advantages=[-1.0, -1.0, -1.0, -1.0, 1.0, 1.0],
        old_logprobs=[-1.0] * 6,
        engine_logprobs=[-1.0, -1.0, -0.2, -0.4, -0.2, -0.4],
        weights=[1.0] * 6,
    )
    logprobs = torch.full((6,), -1.0, requires_grad=True)
    result = evaluate(logprobs, given, correction="none", sequence_mask=0.5)
    result.loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([1, 1, 0, 0, -1, -1])
    assert result.metrics["sequence_mask"].tolist() == [1, 1, 0, 0, 1, 1]


def test_value_loss():
    # Values before 0, returns 1: the clipped value counts where it is farther from the return.
    values = torch.tensor([0.5, -0.5, 0.1, 2.5], requires_grad=True)
    given = streams([4], values=[0.0] * 4, returns=[1.0, 1.0, 1.0, 1.0])
    terms = value_loss(values, given, AlgorithmSettings(name="ppo", value_clip=0.2))
    assert terms.loss.tolist() == pytest.approx([0.5 * 0.64, 0.5 * 2.25, 0.5 * 0.81, 0.5 * 2.25])
    terms.loss.sum().backward()
    # In the first, the value is where the clip holds it; the second moved away from the return.
    assert values.grad.tolist() == pytest.approx([0.0, -1.5, -0.9, 1.5])
    assert terms.metrics["value_clip_fraction"].tolist() == [1, 0, 0, 0]
    plain = value_loss(values, given, AlgorithmSettings(name="ppo", value_clip=None))
    assert plain.loss.tolist() == pytest.approx([0.125, 1.125, 0.405, 1.125])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_at_masked_positions_change_nothing(bad):
    algorithm, settings = get_algorithm("ppo"), AlgorithmSettings(name="ppo")
    given = streams([3], [True, False, True], values=[0.0] * 3, returns=[1.0, 0.0, 0.5], weights=[0.5, 0.0, 0.5])
    losses = []
    for value in (0.0, bad):
        values = torch.tensor([0.1, value, 0.2], requires_grad=True)
        result = critic_objective(algorithm, settings, values, given)
        result.loss.backward()
        assert torch.isfinite(values.grad).all()
        losses.append(result.loss.item())
    assert losses[0] == losses[1]


def test_explained_variance():
    returns, mask = np.array([0.0, 1.0, 2.0, 99.0]), np.array([True, True, True, False])
    assert explained_variance(returns, np.array([0.0, 1.0, 2.0, 0.0]), mask)["critic/explained_variance"] == 1.0
    assert explained_variance(returns, np.zeros(4), mask)["critic/explained_variance"] == 0.0
    halved = explained_variance(returns, np.array([0.5, 1.0, 1.5, 7.0]), mask)
    assert halved["critic/explained_variance"] == pytest.approx(0.75)
    assert explained_variance(np.ones(4), np.zeros(4), mask) == {}
    assert explained_variance(returns, np.zeros(4), np.zeros(4, bool)) == {}
