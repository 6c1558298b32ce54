"""Rows are used exactly once, and what would make a replay wrong in silence is refused."""

import numpy as np
import pytest
import torch
from tiny import build, random_ids, run

from vime_proto.errors import ContractError
from vime_r3.megatron import ReplayError, attach


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture
def replay(model):
    attached = attach(model)
    yield attached
    attached.detach()


def test_no_forward_pass(replay):
    with pytest.raises(ReplayError, match="ran no forward pass"), replay.use(random_ids(12, 3)):
        pass


def test_two_forward_passes(model, replay, batch):
    with pytest.raises(ReplayError, match="second forward pass"), replay.use(random_ids(12, 3)):
        run(model, batch[0])
        run(model, batch[0])
    run(model, batch[0])


def test_nested_use(replay):
    with pytest.raises(ReplayError, match="in use"), replay.use(random_ids(12, 3)), replay.use(random_ids(12, 3)):
        pass


def test_a_router_that_did_not_run(model, replay, batch, monkeypatch):
    layer = model.decoder.layers[1]
    monkeypatch.setattr(layer.mlp, "forward", lambda hidden, **_: (torch.zeros_like(hidden), None))
    with pytest.raises(ReplayError, match="uses were layer 1: 0"), replay.use(random_ids(12, 3)):
        run(model, batch[0])


def test_a_router_that_ran_twice(model, replay, batch, monkeypatch):
    router = model.decoder.layers[1].mlp.router
    once = router.forward
    monkeypatch.setattr(router, "forward", lambda *args: (once(*args), once(*args))[1])
    with pytest.raises(ReplayError, match="layer 1 ran twice in one forward pass"), replay.use(random_ids(12, 3)):
        run(model, batch[0])


def test_another_number_of_tokens(model, replay, batch):
    with pytest.raises(ReplayError, match="has 12 tokens, but 11 rows"), replay.use(random_ids(11, 3)):
        run(model, batch[0])
    run(model, batch[0])  # a failed pass leaves nothing behind


@pytest.mark.parametrize(
    ("ids", "more", "message"),
    [
        (random_ids(12, 2), {}, r"must be \[tokens, 3, top_k\]"),
        (random_ids(12, 3)[..., :1], {}, "have 1 experts a token, layer 0 has 2"),
        (random_ids(12, 3) + 8, {}, r"must be in \[0, 8\)"),
        (random_ids(12, 3) - 8, {}, r"must be in \[0, 8\)"),
        (random_ids(12, 3).numpy(), {"valid": np.ones(11, dtype=bool)}, r"must be bool \[12\]"),
    ],
)
def test_ids_that_do_not_fit(replay, ids, more, message):
    with pytest.raises(ContractError, match=message), replay.use(ids, **more):
        pass


def test_attaching_twice(model, replay):
    with pytest.raises(ContractError, match="replayed already"):
        attach(model)


def test_a_decoder_that_was_built_twice():
    twice = torch.nn.ModuleList([build(num_layers=1), build(num_layers=1)])
    with pytest.raises(ContractError, match="two routers of layer 0"):
        attach(twice)


def test_a_discarded_decoder_leaves_nothing_behind(batch):
    kept = build(num_layers=1)
    attach(build(num_layers=1))
    replay = attach(kept)
    assert len(replay.layer_ids) == 1
    with replay.use(random_ids(12, 1)):
        run(kept, batch[0])


@pytest.mark.parametrize(
    "settings",
    [
        {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
        {"moe_expert_capacity_factor": 1.0},
        {"moe_router_force_load_balancing": True},
        {"moe_enable_routing_replay": True},
    ],
)
def test_settings_that_would_ignore_routes(settings):
    with pytest.raises(ContractError, match=r"config\.moe_\w+.*: must be off"):
        attach(build(num_layers=1, **settings))


def test_a_model_without_experts_needs_no_routes(batch):
    model = build(moe_layer_freq=[0, 0, 0])
    replay = attach(model)
    assert replay.layer_ids == ()
    with replay.use(random_ids(12, 3), layer_ids=(3, 4, 5)):
        run(model, batch[0])


def test_wrapped_models_are_unwrapped(batch):
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    inner = build(num_layers=1)
    with attach(Wrapper(Wrapper(inner))).use(random_ids(12, 1)):
        run(inner, batch[0])
