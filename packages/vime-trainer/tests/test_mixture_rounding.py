"""In bfloat16 the gates and the sum over a token's experts are float32, as in inference engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests_support import make_folder

from vime_trainer.packed import ReplayRows, pack
from vime_trainer.policy import Policy


@pytest.fixture(scope="module")
def layer(moe_folder):
    policy = Policy.from_hf(moe_folder, dtype="bfloat16")
    return policy.model.decoder.layers[0].mlp


def hidden(count=40, seed=1):
    return torch.randn(count, 1, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_gates_are_float32_softmax_of_rounded_logits(layer):
    tokens = hidden()
    gates, chosen = layer.router(tokens)
    logits = (tokens[:, 0] @ layer.router.weight.t()).float()
    expected = torch.zeros_like(gates)
    top, ids = logits.topk(2, dim=1)
    assert gates.dtype == torch.float32
    torch.testing.assert_close(gates, expected.scatter(1, ids, top.softmax(1)), rtol=0, atol=1e-7)
    assert (gates != gates.bfloat16().float()).any() and bool((chosen.sum(1) == 2).all())


def test_outputs_of_experts_are_added_in_float32_and_rounded_once(layer):
    tokens = hidden()
    out, _ = layer(tokens)
    gates, chosen = layer.router(tokens)
    rows = torch.zeros(40, 64)
    for expert in range(8):
        mine = chosen[:, expert]
        gate, up = (tokens[mine, 0] @ layer.experts.fc1[expert].t()).chunk(2, dim=-1)
        middle = torch.nn.functional.silu(gate.float()) * up.float() * gates[mine, expert, None]
        rows[mine] += (middle.bfloat16() @ layer.experts.fc2[expert].t()).float()
    assert out.dtype == torch.bfloat16
    assert torch.equal(out[:, 0], rows.bfloat16())


def test_gradients_equal_those_of_float32(moe_folder):
    """The sum's own backward pass: in float32 nothing is rounded, so any difference from Megatron's would show."""
    layer = Policy.from_hf(moe_folder).model.decoder.layers[0].mlp
    tokens = hidden().float().requires_grad_()
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(4))
    (layer(tokens)[0][:, 0] * weight).sum().backward()
    again = tokens.detach().clone().requires_grad_()
    gates, chosen = layer.router(again)
    parts = []
    for expert in range(8):
        gate, up = (again[:, 0] @ layer.experts.fc1[expert].t()).chunk(2, dim=-1)
        middle = torch.nn.functional.silu(gate) * up
        parts.append((middle @ layer.experts.fc2[expert].t()) * gates[:, expert, None] * chosen[:, expert, None])
    (sum(parts) * weight).sum().backward()
    torch.testing.assert_close(tokens.grad, again.grad, rtol=1e-5, atol=1e-5)


def test_bfloat16_lies_near_float32(tmp_path):
    folder = make_folder("qwen3_moe", tmp_path / "moe")
    batch = pack([torch.randint(0, 61, (50,), generator=torch.Generator().manual_seed(2))])
    with torch.no_grad():
        exact = Policy.from_hf(folder, replay=True)
        with exact.replay.record() as taken:
            want = exact(batch).logprobs
        rounded = Policy.from_hf(folder, dtype="bfloat16", replay=True)
        ids = torch.stack(list(taken), dim=1).numpy()
        got = rounded(replace(batch, routes=ReplayRows(ids, np.ones(50, bool), (0, 2)))).logprobs
    assert 0 < (got - want).abs().mean() < 0.02
