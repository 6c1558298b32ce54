"""Training on a batch: the gradient does not depend on how the batch is cut, and odd batches have defined results."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make import TinyPolicy, answer, group, index_of, prompt, random_group, rollout, sample, samples_of
from toy import Outcome, run_passes

from vime_proto.sample.v1 import sample_pb2
from vime_trainer.batch import read_columns
from vime_trainer.rl import RlSettings
from vime_trainer.rl._train import AlarmError, BatchTrainer

DIFF = "train_rollout_logprob_abs_diff"


class TinyBackend:
    """A tiny policy whose optimizer step is plain gradient descent; keeps the last gradient."""

    vocab_size = 16
    routed_layers = None
    cost = critic = None

    def __init__(self, seed: int = 0, learning_rate: float = 0.0):
        self.policy = TinyPolicy(seed)
        self.reference = TinyPolicy(seed + 1)
        self.learning_rate = learning_rate
        self.gradients: list[list[torch.Tensor]] = []
        self.not_finite = False

    def run(self, batches, wanted, loss=None):
        return run_passes(self.policy.forward, batches, wanted, loss)

    def run_reference(self, batches, wanted):
        return run_passes(self.reference.forward, batches, wanted)

    def zero_grad(self):
        self.policy.zero_grad()

    def step(self):
        self.gradients.append([p.grad.clone() for p in self.policy.parameters()])
        norm = float(torch.stack([g.norm() for g in self.gradients[-1]]).norm())
        if self.not_finite:
            return Outcome(False, self.learning_rate, float("nan"))
        with torch.no_grad():
            for p in self.policy.parameters():
                p -= self.learning_rate * p.grad
        return Outcome(True, self.learning_rate, norm)


def run_settings(**changes) -> RlSettings:
    batch = {"groups": 4, "group_size": 4, "token_budget": 1000, **changes.pop("batch", {})}
    return RlSettings(model="m", output="o", buffer="h:1", router="h:2", batch=batch, **changes)


def train(groups, backend=None, group_size=4, measure=False, **changes):
    backend = backend or TinyBackend()
    index = index_of(groups)
    columns = read_columns(index, samples_of(groups))
    result = BatchTrainer(backend, run_settings(**changes)).train(index, columns, group_size, measure)
    return result.figures, backend


def some_groups(seed=0, count=4, policy=None, **options):
    random = np.random.default_rng(seed)
    groups = [random_group(f"g{i}", 4, random, policy or TinyPolicy(), **options) for i in range(count)]
    # Fan-out: one rollout with two samples counts once.
    extra = random_group("extra", 1, random, policy or TinyPolicy()).rollouts[0].samples[0]
    groups[0].rollouts[1].samples.append(extra)
    return groups


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    budget=st.integers(1, 60),
    layout=st.sampled_from(["packed", "padded"]),
    aggregation=st.sampled_from(["token", "sequence", "constant"]),
    name=st.sampled_from(["grpo", "gspo", "cispo", "rloo"]),
)
def test_the_cut_does_not_change_loss_or_gradient(seed, budget, layout, aggregation, name):
    groups = some_groups(seed, policy=TinyPolicy(7))
    algorithm = {"name": name, "aggregation": aggregation, "constant_length": 8, "kl": {"coefficient": 0.1}}
    whole, one = train(groups, algorithm=algorithm)
    cut, many = train(groups, algorithm=algorithm, batch={"token_budget": budget, "layout": layout})
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-4, abs=1e-6)
    for a, b in zip(one.gradients[0], many.gradients[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for key in whole:
        if not key.startswith("seconds/"):
            assert cut[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-6), key


def test_the_order_of_groups_does_not_change_the_gradient():
    groups = some_groups(3)
    _, first = train(groups)
    _, second = train(groups[::-1])
    for a, b in zip(first.gradients[0], second.gradients[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_on_policy_figures():
    figures, _ = train(some_groups())
    assert figures[f"{DIFF}/max"] < 1e-6
    assert figures["policy/ratio_min"] == figures["policy/ratio_max"] == 1.0
    assert figures["optimizer_steps"] == 1


def test_gspo_and_grpo_gradients_agree_on_policy_for_equal_lengths():
    groups = [
        group("g", *[rollout(f"r{i}", float(i), sample(f"s{i}", prompt(), answer([3 + i, 4]))) for i in range(4)])
    ]
    _, grpo = train(groups, algorithm={"correction": "none"})
    _, gspo = train(groups, algorithm={"name": "gspo", "correction": "none"})
    for a, b in zip(grpo.gradients[0], gspo.gradients[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_difference_is_of_trainable_tokens_before_the_first_step():
    policy = TinyPolicy()
    groups = some_groups(policy=policy)
    for g in groups:
        for r in g.rollouts:
            generation = r.samples[0].segments[1].generation
            moved = np.frombuffer(generation.logprobs.data, "<f4") - np.float32(0.25)
            generation.logprobs.data = moved.tobytes()
    untouched = groups[0].rollouts[1].samples[1]
    count = sum(len(s.segments[1].generation.logprobs.data) // 4 for s in samples_of(groups).values())
    kept = len(untouched.segments[1].generation.logprobs.data) // 4
    for parts in (1, 3):
        backend = TinyBackend(learning_rate=5.0)
        figures, _ = train(groups, backend, batch={"optimizer_steps": parts})
        assert figures[f"{DIFF}/mean"] == pytest.approx(0.25 * (count - kept) / count, abs=1e-6)
        assert figures[f"{DIFF}/p50"] == pytest.approx(0.25, abs=1e-6)
        assert figures["optimizer_steps"] == parts


def test_several_optimizer_steps_leave_the_policy_behind_the_first():
    figures, backend = train(some_groups(), TinyBackend(learning_rate=3.0), batch={"optimizer_steps": 2})
    assert len(backend.gradients) == 2
    assert figures["policy/ratio_min"] < 1 < figures["policy/ratio_max"]


def test_old_policy_engine_puts_the_engine_into_the_ratio():
    groups = some_groups(policy=TinyPolicy(9))
    figures, _ = train(groups, algorithm={"old_policy": "engine"})
    assert figures["policy/ratio_max"] != 1
    assert "policy/correction_weight" not in figures


def test_failed_and_unreliable_rollouts_change_nothing():
    groups = some_groups()
    _, clean = train(groups)
    groups[0].rollouts.append(rollout("bad", 1.0, sample("bad", prompt(), answer([5, 6, 7])), reliable=False))
    groups[1].rollouts.append(rollout("worse", None, status=sample_pb2.ROLLOUT_STATUS_FAILED))
    _, dirty = train(groups)
    for a, b in zip(clean.gradients[0], dirty.gradients[0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reliable", [False, None])
def test_a_batch_without_trainable_tokens_takes_no_step_and_is_counted(reliable):
    tokens = [3, 4] if reliable is False else []
    groups = [
        group("g", *[rollout(f"r{i}", 1.0, sample(f"s{i}", prompt(), answer(tokens)), reliable=reliable) for i in "ab"])
    ]
    figures, backend = train(groups, group_size=2)
    assert not backend.gradients
    assert figures["optimizer_steps"] == 0 and figures["optimizer_steps/empty"] == 1
    # Nothing was measured, so nothing is said.
    assert not [key for key in figures if key.startswith((DIFF, "policy/", "loss", "grad_norm"))]


def test_a_rollout_with_an_empty_response_stays_in_the_baseline():
    empty = [
        group("g", *[rollout(f"r{i}", float(i == 0), sample(f"s{i}", prompt(), answer([3] * n))) for i, n in enumerate((0, 2, 2))])
    ]  # fmt: skip
    figures, backend = train(empty, group_size=3, algorithm={"correction": "none"})
    assert all(torch.isfinite(g).all() for g in backend.gradients[0])
    assert figures["loss"] == pytest.approx(0.577349, abs=1e-4)  # two of three rollouts, advantage -0.577, ratio 1


def test_a_gradient_that_is_not_finite_is_counted():
    backend = TinyBackend()
    backend.not_finite = True
    figures, _ = train(some_groups(), backend)
    assert figures["optimizer_steps"] == 0 and figures["optimizer_steps/not_finite"] == 1
    assert "grad_norm" not in figures


def test_every_turn_of_a_rollout_gets_the_same_advantage():
    turns = sample("a", prompt(), answer([3, 4, 5]), sample_tool(), answer([6]))
    groups = [group("g", rollout("r0", 1.0, turns), rollout("r1", 0.0, sample("b", prompt(), answer([7]))))]
    index = index_of(groups)
    columns = read_columns(index, samples_of(groups))
    from vime_trainer.algorithms import get_algorithm
    from vime_trainer.rl._train import rollout_batch

    batch = rollout_batch(index, columns, 2)
    values = get_algorithm("grpo").advantage(batch, None)["advantages"]
    trained = values[columns.slice_of(0)][columns.trainable[columns.slice_of(0)]]
    assert len(trained) == 4 and len(set(trained.tolist())) == 1 and trained[0] > 0
    assert (values[~batch.mask] == 0).all()


def sample_tool():
    from make import tool

    return tool([9, 9])


def test_the_alarm_can_stop_before_the_step():
    policy = TinyPolicy()
    near, far = some_groups(policy=policy), some_groups(1, policy=TinyPolicy(5))
    backend = TinyBackend()
    trainer = BatchTrainer(backend, run_settings(alarm={"floor": 1e-3, "action": "fail"}))
    for groups in (near, near):
        index = index_of(groups)
        assert trainer.train(index, read_columns(index, samples_of(groups)), 4).alarm is None
    index = index_of(far)
    with pytest.raises(AlarmError, match="do the engines run the weights"):
        trainer.train(index, read_columns(index, samples_of(far)), 4)
    assert len(backend.gradients) == 2
    warned = BatchTrainer(backend, run_settings())
    for groups in (near, far):
        index = index_of(groups)
        result = warned.train(index, read_columns(index, samples_of(groups)), 4)
    assert "above" in result.alarm


def test_the_alarm_sees_a_single_bad_sequence():
    policy = TinyPolicy()
    groups = some_groups(policy=policy, count=12)
    spoilt = some_groups(policy=policy, count=12)
    generation = spoilt[5].rollouts[2].samples[0].segments[1].generation
    moved = np.frombuffer(generation.logprobs.data, "<f4") - np.float32(3.0)
    generation.logprobs.data = moved.tobytes()
    trainer = BatchTrainer(TinyBackend(), run_settings(alarm={"floor": 0.25}))
    alarms = []
    for one in (groups, groups, spoilt, groups):
        index = index_of(one)
        alarms.append(trainer.train(index, read_columns(index, samples_of(one)), 4).alarm)
    assert [alarm is not None for alarm in alarms] == [False, False, True, False]
    assert "worst sequence's mean is 3" in alarms[2] and "the mean is" not in alarms[2]


def test_a_custom_algorithm_needs_only_the_public_contract():
    figures, _ = train(some_groups(), algorithm={"name": "plugin:REINFORCE", "options": {"scale": 2.0}})
    twice, _ = train(some_groups(), algorithm={"name": "plugin:REINFORCE", "options": {"scale": 4.0}})
    assert twice["loss"] == pytest.approx(2 * figures["loss"])


def test_pause_point_is_asked_between_micro_batches():
    calls = []
    groups = some_groups()
    index = index_of(groups)
    settings_ = run_settings(batch={"token_budget": 8})
    BatchTrainer(TinyBackend(), settings_, lambda: calls.append(1)).train(
        index, read_columns(index, samples_of(groups)), 4
    )
    assert len(calls) > 3
