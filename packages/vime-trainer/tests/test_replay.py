"""Routes that a batch brings decide which experts run, and the gate still learns from them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from vime_trainer.packed import ReplayRows, pack
from vime_trainer.policy import Policy


def rows():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 61, (length,), generator=generator) for length in (9, 6, 9)]


def recorded(policy, batch):
    with torch.no_grad(), policy.replay.record() as taken:
        policy(batch)
    return torch.stack(list(taken), dim=1).numpy().astype(np.uint8)


def replayed(batch, ids, layer_ids, valid=None, measure=False):
    valid = np.ones(len(ids), bool) if valid is None else valid
    return dataclasses.replace(batch, routes=ReplayRows(ids, valid, layer_ids, measure))


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_own_routes_change_nothing_and_shifted_ones_do(moe_folder, layout):
    free = Policy.from_hf(moe_folder)
    policy = Policy.from_hf(moe_folder, layout=layout, replay=True)
    batch = pack(rows())
    free.attach_replay()
    ids = recorded(free, batch)
    assert ids.shape == (24, 2, 2) and policy.replay.layer_ids == (0, 2)
    want = free(batch).logprobs
    same = policy(replayed(batch, ids, (0, 2), measure=True))
    torch.testing.assert_close(same.logprobs, want, rtol=0, atol=2e-6)
    assert same.usage.flips.sum() == 0
    shifted = policy(replayed(batch, np.roll(ids, 1, axis=0), (0, 2)))
    assert (shifted.logprobs - want).abs().mean() > 1e-3


def test_tokens_without_a_route_route_themselves(moe_folder):
    policy = Policy.from_hf(moe_folder, replay=True)
    batch = pack(rows())
    nothing = replayed(batch, np.zeros((24, 2, 2), np.uint8), (0, 2), np.zeros(24, bool))
    assert torch.equal(policy(nothing).logprobs, policy(batch).logprobs)


def test_gate_gradient_of_an_expert_outside_the_live_choice(moe_folder):
    """Against a finite difference, in the direction of one router row that the live top-k never chose."""
    policy = Policy.from_hf(moe_folder, replay=True)
    batch = pack([rows()[0]])
    ids = recorded(policy, batch)
    unused = sorted(set(range(8)) - set(ids[:, 0].flatten().tolist()))
    forced = ids.copy()
    expert = unused[0] if unused else 0
    forced[:, 0, 0] = np.where((ids[:, 0] == expert).any(1), ids[:, 0, 0], expert)
    given = replayed(batch, forced, (0, 2))
    weight = policy.router_modules()[0].weight
    policy(given).logprobs.sum().backward()
    grad = weight.grad[expert].clone()
    assert grad.abs().max() > 1e-3
    direction = grad / grad.norm()
    step = 1e-2
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[expert] += sign * step * direction
            values.append(policy(given).logprobs.double().sum().item())
            weight[expert] -= sign * step * direction
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(float(grad.norm()), rel=2e-2)


def test_routes_need_replay_and_replay_needs_experts(moe_folder, dense_folder):
    batch = replayed(pack([[1, 2, 3]]), np.zeros((3, 2, 2), np.uint8), (0, 2))
    with pytest.raises(ValueError, match="this policy does not replay"):
        Policy.from_hf(moe_folder)(batch)
    with pytest.raises(ValueError, match="qwen3 has no MoE layers"):
        Policy.from_hf(dense_folder, replay=True)


def test_routers_are_found_by_global_layer_number(moe_folder, dense_folder):
    routers = Policy.from_hf(moe_folder).router_modules()
    assert list(routers) == [0, 2] and all(router.layer_number == layer + 1 for layer, router in routers.items())
    assert Policy.from_hf(dense_folder).router_modules() == {}


def test_a_hole_routes_itself_and_a_row_that_was_not_fetched_is_refused(moe_folder):
    """Of two context-parallel ranks one has asked for its rows, of which the engine had no fifth one."""
    from vime_trainer.policy._layouts import Cut, prepare, routed_tokens

    batch = replayed(pack(rows()), np.ones((24, 2, 2), np.uint8), (0, 2), np.arange(24) != 5)
    places = routed_tokens(batch.lengths, False, Cut(0, 2), 24)
    assert places.tolist() == [*range(6), *range(18, 24)]
    routes = dataclasses.replace(batch.routes, fetched=np.isin(np.arange(24), places))
    given = dataclasses.replace(batch, routes=routes)
    shared = (None, torch.device("cpu"), torch.float32, False, 61)
    mine = prepare(given, *shared, Cut(0, 2))
    assert np.array_equal(mine.seen, places) and mine.routes.valid.tolist() == [place != 5 for place in places]
    with pytest.raises(
        ValueError, match="routes: token 6 of a batch is routed on this rank, which has not fetched its row"
    ):
        prepare(given, *shared, Cut(1, 2))


@pytest.mark.parametrize(
    ("routed", "replayed", "said"),
    [([2, 4], [2, 0], "token 1 .* routed in 4 of 2"), ([2, 2], [1, 2], "token 0 .* replayed in 1")],
)
def test_tokens_of_all_ranks_together_are_routed_and_replayed_once(routed, replayed, said):
    from vime_r3.megatron import ReplayError
    from vime_trainer.policy._usage import _check_once

    _check_once(torch.tensor([2, 2, 2]), torch.tensor([0, 2, 2]), 2)
    with pytest.raises(ReplayError, match=said):
        _check_once(torch.tensor(routed), torch.tensor(replayed), 2)


def test_routes_recorded_in_one_cut_are_replayed_in_another(moe_folder):
    """The old policy's choice (R2): kept sample by sample, and used after the weights have moved."""
    from vime_trainer.packed import RecordRows

    policy = Policy.from_hf(moe_folder, replay=True)
    sequences = rows()
    policy.run([dataclasses.replace(pack(sequences), routes=RecordRows()), pack(sequences[:1])], [None, None])
    (kept, nothing), lengths = policy.recorded, [len(one) for one in sequences]
    assert nothing is None and kept.layer_ids == (0, 2) and kept.ids.dtype == np.uint8 and kept.valid.all()
    with torch.no_grad():
        assert np.array_equal(recorded(policy, pack(sequences)), kept.ids)
    parts = np.split(kept.ids, np.cumsum(lengths)[:-1])
    for router in policy.router_modules().values():
        router.weight.data += torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1))
    order = (2, 0, 1)
    batch = replayed(
        pack([sequences[i] for i in order]), np.concatenate([parts[i] for i in order]), (0, 2), measure=True
    )
    chosen = {}
    for layer, router in policy.router_modules().items():
        router.register_forward_hook(lambda _m, _i, out, layer=layer: chosen.update({layer: out[1].clone()}))
    loss = []
    (out,) = policy.run([batch], [None], lambda _, outputs: loss.append(outputs.logprobs.sum()) or loss[-1])
    assert int(out.usage.flips.sum()) > 5 and out.usage.recomputed == [0, 0]
    for place, layer in enumerate((0, 2)):
        ids = torch.from_numpy(batch.routes.ids[:, place].astype(np.int64))
        assert torch.equal(chosen[layer], torch.zeros(24, 8, dtype=torch.bool).scatter(1, ids, True))
