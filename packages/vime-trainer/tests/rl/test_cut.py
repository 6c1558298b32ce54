"""Loss and gradient of a batch do not depend on how it is cut into micro-batches and over data ranks."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make import VOCAB, TinyPolicy

from vime_trainer.algorithms import (
    ALGORITHMS,
    AlgorithmSettings,
    RolloutBatch,
    advantage_streams,
    correction_scale,
    critic_objective,
    get_algorithm,
    objective,
    required_columns,
    token_weights,
)
from vime_trainer.batch import Columns, build_micro_batch, plan_step

EVERY = sorted(ALGORITHMS)


@st.composite
def batches(draw):
    """Columns, rollout batch: fan-out, rollouts without samples, masks, equal rewards, rollouts that are not usable."""
    group_size, count = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    rollouts = group_size * count
    fan_out = draw(st.lists(st.integers(0, 3), min_size=rollouts, max_size=rollouts))
    owners = np.repeat(np.arange(rollouts), fan_out)
    lengths = np.array(draw(st.lists(st.integers(1, 7), min_size=len(owners), max_size=len(owners))), np.int64)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    trainable = random.random(total) < draw(st.sampled_from([0.2, 0.7, 1.0]))
    # The first token of a sample is predicted by nothing.
    trainable[starts] = False
    usable = random.random(rollouts) < draw(st.sampled_from([0.6, 1.0]))
    rewards = random.integers(0, 1 + draw(st.integers(0, 2)), rollouts).astype(np.float64)
    rewards[~usable] = np.nan
    columns = Columns(
        tokens=random.integers(1, VOCAB, total),
        trainable=trainable,
        engine_logprobs=random.normal(-2.5, 0.5, total).astype(np.float32),
        temperature=np.ones(total, np.float32),
        starts=starts,
        lengths=lengths,
        routing=(None,) * len(lengths),
    )
    noise = {name: random.normal(-2.5, 0.5, total).astype(np.float32) for name in ("old", "reference", "teacher")}
    batch = RolloutBatch(
        rewards=rewards,
        groups=np.repeat(np.arange(count), group_size),
        usable=usable,
        truncated=np.zeros(rollouts, bool),
        sample_rollouts=owners,
        lengths=lengths,
        mask=trainable & usable[np.repeat(owners, lengths)],
        group_ids=tuple(f"g{i}" for i in range(count)),
        group_size=group_size,
        logprobs={"engine": columns.engine_logprobs, **noise},
        values=random.normal(0, 1, total).astype(np.float32),
    )
    return columns, batch


class TinyCritic(TinyPolicy):
    """Values instead of log-probs, from the same hidden states."""

    def values(self, batch):
        hidden = torch.cat([part.cumsum(0).tanh() for part in self.embed[batch.tokens].split(batch.lengths)])
        values = torch.cat([hidden[:1], hidden[:-1]]) @ self.head[0]
        return values.masked_fill(batch.positions == 0, 0.0)


def gradient(columns, batch, options, critic, plan):
    """Sums loss and gradient over all ranks and micro-batches of a plan, as data-parallel ranks would."""
    algorithm = get_algorithm(options.name)
    needed = required_columns(algorithm, options)
    logprobs = {f"{name}_logprobs": batch.logprobs[name] for name in needed & set(batch.logprobs)}
    streams = {**advantage_streams(algorithm, batch, options), **logprobs}
    streams |= {"engine_logprobs": columns.engine_logprobs, "values": batch.values}
    if options.correction_normalise:
        streams["correction_scale"] = correction_scale(batch, options, batch.mask)
    weights = token_weights(batch, options.aggregation, options.constant_length)
    model = TinyCritic(3) if critic else TinyPolicy(3)
    loss = 0.0
    for rank in plan:
        for chosen in rank:
            if not chosen:
                continue
            micro = build_micro_batch(columns, chosen, weights != 0, {**streams, "weights": weights})
            if critic:
                result = critic_objective(algorithm, options, model.values(micro.batch), micro.streams)
            else:
                outputs = model(micro.batch, micro.streams.mask)
                result = objective(algorithm, options, outputs.logprobs, outputs.entropy, micro.streams)
            result.loss.backward()
            loss += result.loss.item()
    return loss, [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def compare(columns, batch, options, critic, ranks, budget, layout, multiple):
    wanted = np.flatnonzero(np.bincount(np.repeat(np.arange(len(columns.lengths)), columns.lengths), batch.mask))
    whole = gradient(columns, batch, options, critic, [[wanted.tolist()]])
    plan = plan_step(columns.lengths, wanted, ranks, budget, layout, multiple)
    cut = gradient(columns, batch, options, critic, plan)
    assert cut[0] == pytest.approx(whole[0], rel=1e-4, abs=1e-5)
    for one, other in zip(whole[1], cut[1], strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    if not len(wanted):
        assert whole[0] == 0.0


CUT = dict(
    drawn=batches(),
    aggregation=st.sampled_from(["token", "sequence", "constant"]),
    ranks=st.integers(1, 3),
    budget=st.integers(1, 40),
    layout=st.sampled_from(["packed", "padded"]),
    multiple=st.integers(1, 2),
)


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(
    **CUT,
    name=st.sampled_from(EVERY),
    kl=st.sampled_from(
        [{}, {"coefficient": 0.1, "place": "loss", "estimator": "k3+"}, {"coefficient": 0.1, "place": "reward"}]
    ),
    correction=st.sampled_from(["tis", "tis_sequence", "geometric", "k3"]),
    more=st.sampled_from([{}, {"sequence_mask": 0.1}, {"correction_normalise": True}, {"entropy_coefficient": 0.1}]),
)
def test_the_cut_changes_neither_loss_nor_gradient(
    drawn, aggregation, ranks, budget, layout, multiple, name, kl, correction, more
):
    if kl.get("place") == "reward" and not get_algorithm(name).kl_in_reward:
        kl = {}
    options = AlgorithmSettings(
        name=name,
        aggregation=aggregation,
        constant_length=8,
        old_policy="trainer",
        correction=correction,
        kl=kl,
        **more,
    )
    compare(*drawn, options, False, ranks, budget, layout, multiple)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(**CUT)
def test_the_cut_changes_nothing_for_the_critic(drawn, aggregation, ranks, budget, layout, multiple):
    options = AlgorithmSettings(name="ppo", aggregation=aggregation, constant_length=8)
    compare(*drawn, options, True, ranks, budget, layout, multiple)


@given(drawn=batches(), name=st.sampled_from(EVERY))
def test_rollouts_that_are_not_usable_change_no_advantage(drawn, name):
    _, batch = drawn
    algorithm = get_algorithm(name)
    kl = {"coefficient": 0.1, "place": "reward" if algorithm.kl_in_reward else "loss"}
    options = AlgorithmSettings(name=name, aggregation="token", kl=kl)
    found = advantage_streams(algorithm, batch, options)
    batch.rewards[~batch.usable] = 1e9
    for values in (*batch.logprobs.values(), batch.values):
        values[~batch.mask] = np.nan
    for key, stream in advantage_streams(algorithm, batch, options).items():
        np.testing.assert_array_equal(stream, found[key])
        assert (stream[~batch.mask] == 0).all()
