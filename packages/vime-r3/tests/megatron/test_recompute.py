"""Activation recompute reads the rows of its own micro-batch, whatever the order of backward passes."""

import pytest
import torch
from tiny import build, random_ids, run

from vime_r3.megatron import ReplayError, attach

RECOMPUTE = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def tokens(seed):
    return torch.randint(0, 32, (1, 12), generator=torch.Generator().manual_seed(seed))


def gradients(kind, order):
    """Gradients after three micro-batches (the last without routes) whose backward passes run in ``order``."""
    model = build(seed=3, **RECOMPUTE[kind])
    replay = attach(model)
    losses = []
    for number in range(2):
        with replay.use(random_ids(12, 3, seed=number), torch.arange(12) != number):
            losses.append(run(model, tokens(number), tokens(number + 10)).sum())
    losses.append(run(model, tokens(2), tokens(12)).sum())
    with torch.no_grad(), replay.use(random_ids(12, 3, seed=9)):
        run(model, tokens(4))
    if order == "together":
        sum(losses).backward()
    else:
        for number in order:
            losses[number].backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def expected():
    return gradients("none", (0, 1, 2))


@pytest.mark.parametrize("kind", ["full", "moe"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), "together"])
def test_gradients_equal_those_without_recompute(expected, kind, order):
    found = gradients(kind, order)
    assert float(expected["decoder.layers.0.mlp.router.weight"].abs().sum()) > 0
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", ["full", "moe"])
def test_a_graph_can_be_walked_twice(kind):
    model = build(**RECOMPUTE[kind])
    with attach(model).use(random_ids(12, 3)):
        loss = run(model, tokens(0)).square().sum()
        loss.backward(retain_graph=True)
    once = model.decoder.layers[0].mlp.router.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.decoder.layers[0].mlp.router.weight.grad, 2 * once)


def test_recompute_really_runs_routers_again(monkeypatch):
    model = build(**RECOMPUTE["full"])
    calls = []
    router = model.decoder.layers[0].mlp.router
    router.register_forward_hook(lambda _m, _i, out: calls.append(out[1].clone()))
    ids = random_ids(12, 3)
    with attach(model).use(ids):
        run(model, tokens(0), tokens(1)).sum().backward()
    assert len(calls) == 2 and torch.equal(calls[0], calls[1])


@pytest.mark.parametrize("kind", ["none", "full", "moe"])
def test_one_forward_one_backward_in_turn(kind):
    """A pipeline stage runs the next micro-batch's forward pass before it comes back to the last one's backward pass."""

    def run_all(kind, ahead):
        model = build(seed=3, **RECOMPUTE[kind])
        replay = attach(model)
        waiting, usages = [], []
        for number in range(5):
            with replay.use(random_ids(12, 3, seed=number), torch.arange(12) != number, measure=True) as usage:
                waiting.append((run(model, tokens(number), tokens(number + 10)).sum(), usage))
            if len(waiting) > ahead:
                loss, done = waiting.pop(0)
                loss.backward()
                usages.append(done)
        for loss, done in waiting:
            loss.backward()
            usages.append(done)
        return {name: parameter.grad for name, parameter in model.named_parameters()}, usages

    want, _ = run_all("none", 0)
    for ahead in (0, 1, 3):
        found, usages = run_all(kind, ahead)
        for usage in usages:
            usage.check_recomputed(kind != "none")
            assert int(usage.flips.sum()) > 0
        for name, gradient in want.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5)


def test_a_router_that_recomputation_left_out_is_named():
    model = build(**RECOMPUTE["full"])
    with attach(model).use(random_ids(12, 3)) as usage:
        loss = run(model, tokens(0), tokens(1)).sum()
    with pytest.raises(ReplayError, match="no backward pass"):
        usage.check_recomputed(True)
    loss.backward()
    usage.check_recomputed(True)
    with pytest.raises(ReplayError, match="must run 0 times in the backward pass; runs were layer 0: 1"):
        usage.check_recomputed(False)
    usage.recomputed[1] = 0
    with pytest.raises(ReplayError, match="must run 1 times in the backward pass; runs were layer 1: 0"):
        usage.check_recomputed(True)
