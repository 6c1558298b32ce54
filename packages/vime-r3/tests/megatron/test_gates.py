"""What a replayed router answers: the gates of 2510.11370, equation by equation."""

import contextlib

import numpy as np
import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from tiny import build

from vime_r3.megatron import attach


class Alone(torch.nn.Module):
    """A model that is one router over given logits."""

    def __init__(self, **settings):
        super().__init__()
        config = build(num_layers=1, **settings).config
        self.router = TopKRouter(config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
        self.router.set_layer_number(1)

    def forward(self, logits):
        return self.router.routing(logits[:, None])


def test_gate_is_the_softmax_of_live_scores_over_replayed_experts():
    model = Alone(num_moe_experts=4)
    logits = torch.tensor([[2.0, 1.0, 0.5, 1.9]], requires_grad=True)
    own, _ = model(logits)
    torch.testing.assert_close(own, torch.tensor([[0.524979, 0.0, 0.0, 0.475021]]), atol=1e-6, rtol=0)
    with attach(model).use(torch.tensor([[[1, 3]]])):
        gates, chosen = model(logits)
    torch.testing.assert_close(gates, torch.tensor([[0.0, 0.289050, 0.0, 0.710950]]), atol=1e-6, rtol=0)
    assert chosen.tolist() == [[False, True, False, True]]


def test_gradient_reaches_a_replayed_expert_outside_the_live_top_k():
    model = Alone(num_moe_experts=4)
    logits = torch.tensor([[2.0, 1.0, 0.5, 1.9]], requires_grad=True)
    with attach(model).use(torch.tensor([[[1, 2]]])):
        gates, _ = model(logits)
    gates[0, 1].backward()
    g = torch.softmax(torch.tensor([1.0, 0.5]), dim=0)
    expected = torch.tensor([[0.0, g[0] * g[1], -g[0] * g[1], 0.0]])
    torch.testing.assert_close(logits.grad, expected, atol=1e-6, rtol=0)


def test_sigmoid_scores_with_a_bias_keep_it_out_of_the_gate():
    model = Alone(
        num_moe_experts=4,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5,
    )
    model.router.expert_bias.copy_(torch.tensor([5.0, -5.0, 1.0, 0.0]))
    logits = torch.tensor([[2.0, 1.0, 0.5, 1.9]])
    with attach(model).use(torch.tensor([[[3, 1]]])):
        gates, _ = model(logits)
    scores = torch.sigmoid(logits[0])
    expected = torch.zeros(1, 4)
    expected[0, [1, 3]] = 2.5 * scores[[1, 3]] / (scores[1] + scores[3])
    torch.testing.assert_close(gates, expected, atol=1e-6, rtol=0)


def test_group_limited_routing_does_not_mask_replayed_experts():
    model = Alone(
        num_moe_experts=4, moe_router_num_groups=2, moe_router_group_topk=1, moe_router_score_function="sigmoid"
    )
    logits = torch.tensor([[2.0, 1.0, 0.5, 1.9]])
    with attach(model).use(torch.tensor([[[0, 3]]])):
        gates, chosen = model(logits)
    assert chosen.tolist() == [[True, False, False, True]]
    assert torch.isfinite(gates).all() and float(gates.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "settings", [{"moe_router_pre_softmax": True}, {"moe_router_topk": 1, "moe_router_pre_softmax": True}]
)
def test_replaying_the_own_choice_changes_nothing(settings):
    model = Alone(**settings)
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    replay = attach(model)
    with replay.record() as ids:
        own = model(logits)
    with replay.use(torch.stack(ids, dim=1)):
        again = model(logits)
    assert torch.equal(own[0], again[0]) and torch.equal(own[1], again[1])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"moe_router_pre_softmax": True},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_router_score_function": "sigmoid", "moe_router_num_groups": 2, "moe_router_group_topk": 1},
    ],
)
def test_holes_have_the_choice_and_gradient_of_the_model_alone(settings):
    model = Alone(num_moe_experts=8, **settings)
    if settings.get("moe_router_enable_expert_bias"):
        model.router.expert_bias.copy_(torch.linspace(1.0, -1.0, 8))
    make = torch.Generator().manual_seed(1)
    logits = torch.randn(50, 8, generator=make, requires_grad=True)
    slopes = torch.randn(50, 8, generator=make)

    def found():
        gates, chosen = model(logits)
        return gates.detach(), chosen, *torch.autograd.grad((gates * slopes).sum(), logits)

    alone = found()
    replay = attach(model)
    hole = torch.arange(50) % 7 == 0
    ids = torch.rand(50, 1, 8, generator=make).argsort(dim=2)[:, :, :2]
    ways = []
    for measure in (False, True):
        with replay.use(ids, ~hole, measure=measure):
            ways.append(found())
    for one, other, own in zip(*ways, alone, strict=True):
        assert torch.equal(one, other) and torch.equal(one[hole], own[hole])
    assert torch.equal(ways[0][1][~hole], torch.zeros(50, 8, dtype=torch.bool).scatter(1, ids[:, 0], True)[~hole])


def test_routes_are_copied_on_the_host_whatever_the_default_device_is():
    model = Alone(num_moe_experts=4)
    ids, valid = np.array([[[1, 3]], [[9, 9]]], dtype=np.uint8), np.array([True, False])
    logits = torch.tensor([[2.0, 1.0, 0.5, 1.9]] * 2)
    with contextlib.ExitStack() as stack:
        with torch.device("meta"):
            stack.enter_context(attach(model).use(ids, valid))
        _, chosen = model(logits)
    assert chosen.tolist() == [[False, True, False, True], [True, False, False, True]]
