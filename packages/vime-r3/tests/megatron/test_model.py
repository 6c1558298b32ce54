"""Replay in a whole model."""

import numpy as np
import pytest
import torch
from tiny import EXPERTS, build, random_ids, run

from vime_proto.errors import ContractError
from vime_proto.version import policy_version
from vime_r3.agreement import compare
from vime_r3.layout import pack
from vime_r3.megatron import ReplayError, _pass, _rows, attach
from vime_r3.trace import decode, encode


def reference(layer, hidden, ids, score_function):
    """A mixture-of-experts layer with forced ids in plain torch; hidden is ``[tokens, 1, width]``."""
    logits = hidden[:, 0] @ layer.router.weight.t()
    picked = logits.gather(1, ids)
    if score_function == "softmax":
        gates = torch.softmax(picked, dim=1)
    else:
        gates = torch.sigmoid(picked) / torch.sigmoid(picked).sum(dim=1, keepdim=True)
    output = torch.zeros_like(hidden[:, 0])
    for token in range(len(hidden)):
        for place in range(ids.shape[1]):
            expert = layer.experts.local_experts[ids[token, place]]
            gate, up = (expert.linear_fc1.weight @ hidden[token, 0]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            output[token] += gates[token, place] * (expert.linear_fc2.weight @ inner)
    return output


def watch(model):
    """Input, output and chosen experts of every layer's experts module in the next forward pass."""
    seen = {}
    for layer in model.decoder.layers:
        number = layer.layer_number - 1
        layer.mlp.router.register_forward_hook(
            lambda _m, _i, out, number=number: seen.setdefault(number, {}).update(chosen=out[1].detach())
        )
        layer.mlp.register_forward_hook(
            lambda _m, inputs, out, number=number: seen.setdefault(number, {}).update(
                hidden=inputs[0].detach(), output=out[0].detach()
            )
        )
    return seen


def chosen_mask(ids):
    return torch.zeros(len(ids), EXPERTS, dtype=torch.bool).scatter(1, ids, True)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_perturbed_routers_use_exactly_the_forced_experts(batch, score_function):
    model = build(moe_router_score_function=score_function)
    for layer in model.decoder.layers:
        layer.mlp.router.weight.data += torch.randn_like(layer.mlp.router.weight)
    seen = watch(model)
    ids = random_ids(12, 3)
    with attach(model).use(ids, measure=True) as usage:
        run(model, batch[0])
    assert int(usage.flips.sum()) > 12, "the forced routes must differ from the model's own"
    for number, layer in enumerate(model.decoder.layers):
        assert torch.equal(seen[number]["chosen"], chosen_mask(ids[:, number]))
        expected = reference(layer.mlp, seen[number]["hidden"], ids[:, number], score_function)
        torch.testing.assert_close(seen[number]["output"][:, 0], expected, atol=1e-6, rtol=0)


def test_holes_route_themselves_while_their_neighbours_replay(batch):
    model = build()
    replay = attach(model)
    with replay.record() as own:
        run(model, batch[0])
    seen = watch(model)
    ids = random_ids(12, 3)
    valid = torch.arange(12) % 3 != 0
    ids[~valid] = 0
    with replay.use(ids, valid):
        run(model, batch[0])
    # Below the first layer nothing has changed yet, so its holes must choose as they do alone.
    first = torch.where(valid[:, None], ids[:, 0], own[0])
    assert torch.equal(seen[0]["chosen"], chosen_mask(first))
    for number in range(3):
        assert torch.equal(seen[number]["chosen"][valid], chosen_mask(ids[valid, number]))
        assert (seen[number]["chosen"].sum(dim=1) == 2).all()


def test_all_holes_is_the_model_alone(batch):
    model = build()
    alone = run(model, batch[0], batch[2])
    replay, nothing = attach(model), (torch.zeros(12, 3, 2, dtype=torch.uint8), np.zeros(12, dtype=bool))
    with replay.use(*nothing):
        assert torch.equal(run(model, batch[0], batch[2]), alone)
    with replay.use(*nothing, measure=True) as usage:
        assert torch.equal(run(model, batch[0], batch[2]), alone)
    assert usage.flips.tolist() == [0, 0, 0]


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int64, torch.uint8])
def test_tokens_that_nobody_reads_look_for_no_route_of_their_own(batch, monkeypatch, kind, measure):
    model, ids = build(), random_ids(12, 3)
    valid, unread = torch.arange(12) % 5 != 1, torch.arange(12) >= 10
    ids[~valid] = 99
    given = ids.to(kind) if isinstance(kind, torch.dtype) else ids.numpy().astype(kind)
    replay, seen, looked = attach(model), watch(model), []
    index_select = torch.Tensor.index_select
    monkeypatch.setattr(
        torch.Tensor, "index_select", lambda one, dim, places: looked.append(places) or index_select(one, dim, places)
    )
    with replay.use(given, valid, unread=unread, measure=measure) as usage:
        run(model, batch[0])
    rows = [seen[number]["chosen"] for number in range(3)]
    for number in range(3):
        # Token 11 has no row and is read by nobody; token 10 has one; tokens 1 and 6 route themselves.
        assert torch.nonzero(rows[number][11]).flatten().tolist() == [4, 5]  # the third without a row
        assert torch.equal(rows[number][valid], chosen_mask(ids[valid, number]))
    # The others are Megatron's, of all tokens.
    assert measure or [places.tolist() for places in looked if len(places) < 12] == [[1, 6]] * 3
    if measure:
        assert usage.replayed.tolist() == [3 * int(one) for one in valid]
        assert int(usage.flips[0]) <= int(valid.sum()) and not usage.flipped[~valid].any()


@pytest.mark.parametrize("spared", [True, False])
def test_rows_on_a_device_become_what_rows_on_the_host_do(spared):
    routers = attach(build())._routers
    ids, valid = random_ids(12, 3), torch.arange(12) % 5 != 1
    unread = torch.arange(12) >= 10 if spared else None
    ids[~valid] = 0
    masks = (valid.numpy(), unread.numpy() if spared else None)
    rows, has, live, holes = _rows._from_host(ids.numpy(), *masks, routers, torch.device("cpu"), True)
    found = _rows._from_device(ids, valid, unread, EXPERTS)
    assert all(torch.equal(one, other) for one, other in zip((rows, has, live), found[:3], strict=True))
    assert found[3] is None and holes.tolist() == ([1, 6] if spared else [1, 6, 11])


def test_tokens_that_nobody_reads_load_all_experts_alike():
    by_number = [_rows._filler(number, 3, 8) for number in (np.arange(16), torch.arange(16))]
    assert by_number[0].tolist() == by_number[1].tolist()
    assert all(len(set(one)) == 3 for one in by_number[0].tolist())
    assert np.bincount(by_number[0].flatten()).tolist() == [6] * 8


def test_what_nobody_reads_changes_nothing_else(batch):
    model = build()
    replay, ids = attach(model), random_ids(12, 3)
    valid = torch.arange(12) < 11
    found = []
    for unread in (None, ~valid):
        with replay.use(ids, valid, unread=unread):
            # The last token of a causal model: its own output is left out.
            found.append(run(model, batch[0], batch[2])[..., :11].clone())
    assert torch.equal(*found)
    with pytest.raises(ContractError, match=r"unread: must be bool \[12\]"), replay.use(ids, valid, unread=valid[:3]):
        pass


def test_outside_use_the_model_routes_itself(batch):
    model = build()
    alone = run(model, batch[0])
    replay = attach(model)
    assert torch.equal(run(model, batch[0]), alone)
    with replay.use(random_ids(12, 3)):
        assert not torch.equal(run(model, batch[0]), alone)
    assert torch.equal(run(model, batch[0]), alone)
    replay.detach()
    replay.detach()
    assert torch.equal(run(model, batch[0]), alone)
    assert all(layer.mlp.router.router_replay is None for layer in model.decoder.layers)
    with pytest.raises(ReplayError, match="detached"), replay.use(random_ids(12, 3)):
        pass


def test_two_models_replay_apart(batch):
    policy, teacher = build(seed=1), build(seed=2)
    alone = run(teacher, batch[0])
    replay = attach(policy)
    attach(teacher)
    with replay.use(random_ids(12, 3)):
        assert torch.equal(run(teacher, batch[0]), alone)
        run(policy, batch[0])


@pytest.mark.parametrize("at_once", [1, 1 << 20], ids=["layer by layer", "all layers"])
def test_measured_flips_are_those_of_the_models_own_choice(batch, monkeypatch, at_once):
    monkeypatch.setattr(_pass, "_COMPARED", at_once)
    model = build()
    replay = attach(model)
    with replay.record() as own:
        run(model, batch[0])
    with replay.use(torch.stack(own, dim=1), measure=True) as same:
        run(model, batch[0])
    assert same.flips.tolist() == [0, 0, 0] and not same.flipped.any()
    ids = random_ids(12, 3)
    valid = np.arange(12) != 4
    with replay.use(ids, valid, measure=True, exact=np.arange(12) > 5) as usage:
        run(model, batch[0])
    assert usage.replayed.tolist() == [3 * int(one) for one in valid] and same.replayed.tolist() == [3] * 12
    assert torch.nonzero(usage.inexact).flatten().tolist() == [0, 1, 2, 3, 5] and same.inexact is None
    first = compare(own[0][:, None].numpy(), ids[:, :1].numpy(), layer_ids=(0,), valid=valid)
    assert int(usage.flips[0]) == int(first.flips[0])
    assert not usage.flipped[4]


def test_a_trace_replays_from_bytes(batch):
    model = build()
    ids = random_ids(6, 5).numpy().astype(np.uint8)
    trace = encode(ids, layer_ids=range(5), experts=EXPERTS, version=policy_version("run", 0, 1))
    packed, valid = pack([decode(trace), None], [7, 5])
    seen = watch(model)
    with attach(model).use(packed, valid, layer_ids=range(5)) as usage:
        run(model, batch[0])
    assert usage.tokens == 12
    for number in range(3):
        assert torch.equal(seen[number]["chosen"][:6], chosen_mask(torch.from_numpy(ids[:, number]).long()))


def test_layers_after_dense_ones_are_found_by_global_number(batch):
    model = build(num_layers=4, moe_layer_freq=[0, 0, 1, 1])
    replay = attach(model)
    assert replay.layer_ids == (2, 3)
    seen = watch_moe(model)
    ids = random_ids(12, 3)
    with replay.use(ids, layer_ids=(1, 2, 3)):
        run(model, batch[0])
    assert torch.equal(seen[2], chosen_mask(ids[:, 1])) and torch.equal(seen[3], chosen_mask(ids[:, 2]))
    with pytest.raises(ContractError, match=r"lack layers \[2\]"), replay.use(ids[:, :2], layer_ids=(1, 3)):
        pass


def watch_moe(model):
    seen = {}
    for layer in model.decoder.layers[2:]:
        number = layer.layer_number - 1
        layer.mlp.router.register_forward_hook(lambda _m, _i, out, number=number: seen.update({number: out[1]}))
    return seen


def test_routers_of_multi_token_prediction_are_left_alone(batch):
    model = build(mtp=1)
    replay = attach(model)
    assert replay.layer_ids == (0, 1, 2)
    routers = [module for module in model.mtp.modules() if type(module).__name__ == "TopKRouter"]
    assert len(routers) == 1 and routers[0].router_replay is None
    with replay.use(random_ids(12, 3)):
        loss = run(model, batch[0], batch[2])
    loss.sum().backward()
    assert float(routers[0].weight.grad.abs().sum()) > 0
