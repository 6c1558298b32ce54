"""The faster ways give what the plain ways give: values and gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vime_trainer import fused
from vime_trainer.fused import Switches, switches
from vime_trainer.megatron._activation import weighted_swiglu
from vime_trainer.megatron._dispatch import plan_rows
from vime_trainer.megatron._rms import _RmsNorm, rms_norm
from vime_trainer.optim import Optimizer, OptimizerSettings
from vime_trainer.packed import pack
from vime_trainer.policy import Policy, _logits
from vime_trainer.policy._logprobs import token_logprobs


def test_public_names():
    assert fused.__all__ == ["Switches", "fuse", "switches"]


@pytest.fixture
def off():
    """Turns switches off and puts them back."""

    def turn(*names):
        for name in names:
            setattr(switches, name, False)

    yield turn
    for field in dataclasses.fields(Switches):
        setattr(switches, field.name, True)


def rows():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 61, (length,), generator=generator) for length in (11, 5, 40, 1, 2)]


def passes(folder, dtype="float32"):
    policy = Policy.from_hf(folder, dtype)
    out = policy(pack(rows(), temperature=[1.0, 0.7, 1.0, 1.3, 1.0]))
    (out.logprobs + 0.1 * out.entropy).sum().backward()
    grads = {name: param.grad.float() for name, param in policy.parameters().items()}
    return out.logprobs.detach(), grads


@pytest.mark.parametrize("names", [("swiglu",), ("dispatch",), ("rope",), ("swiglu", "dispatch", "rope", "logprobs")])
def test_a_model_computes_the_same_with_a_switch_off(moe_folder, off, names):
    values, grads = passes(moe_folder)
    off(*names)
    plain, plain_grads = passes(moe_folder)
    assert (values - plain).abs().max() < 2e-6
    for name, grad in grads.items():
        assert (grad - plain_grads[name]).norm() < 1e-5 * plain_grads[name].norm().clamp(min=1e-2), name


def test_one_update_is_the_same_with_every_switch_off(moe_folder, off):
    def updated():
        policy = Policy.from_hf(moe_folder)
        optimizer = Optimizer(policy, OptimizerSettings(learning_rate=1e-3))
        (-policy(pack(rows())).logprobs.sum() / 64).backward()
        norm = optimizer.step().grad_norm
        return norm, torch.cat([param.detach().flatten() for param in policy.parameters().values()])

    norm, weights = updated()
    off(*(field.name for field in dataclasses.fields(Switches)))
    plain_norm, plain = updated()
    assert norm == pytest.approx(plain_norm, rel=1e-5)
    # Adam's first step is the sign of the gradient, so an element with almost none may go either way.
    assert ((weights - plain).abs() > 1e-5).float().mean() < 1e-3


def test_rows_are_sorted_by_expert_then_token_and_weighted():
    routing = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 1], [0, 1, 1, 0]], dtype=torch.bool)
    probs = routing * torch.arange(12.0).view(3, 4)
    source, places, counts, weights = plan_rows(routing, probs, 2)
    assert source.tolist() == [1, 0, 2, 2, 0, 1]
    assert counts.tolist() == [1, 2, 1, 2]
    assert weights.tolist() == [4.0, 1.0, 9.0, 10.0, 3.0, 7.0]
    assert places.tolist() == [[1, 4], [0, 5], [2, 3]]


def test_a_token_with_fewer_experts_gets_rows_of_weight_zero():
    routing = torch.tensor([[0, 0, 1], [1, 1, 0]], dtype=torch.bool)
    source, places, counts, weights = plan_rows(routing, routing * torch.ones(2, 3), 2)
    assert counts.sum() == 4 and sorted(source.tolist()) == [0, 0, 1, 1]
    assert weights[places[0]].sum() == 1.0 and weights[places[1]].sum() == 2.0


def test_swiglu_has_the_gradient_of_its_definition():
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randn(7, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(7, generator=generator, dtype=torch.float64, requires_grad=True)
    up = torch.randn(7, 6, generator=generator, dtype=torch.float64)

    gate, value = pairs.chunk(2, -1)
    exact = torch.autograd.grad((gate * gate.sigmoid() * value * weights[:, None]).mul(up).sum(), (pairs, weights))
    inputs = [tensor.detach().float().requires_grad_() for tensor in (pairs, weights)]
    for one, two in zip(
        torch.autograd.grad(weighted_swiglu(*inputs).mul(up.float()).sum(), inputs), exact, strict=True
    ):
        assert (one - two).abs().max() < 1e-5


def test_swiglu_keeps_its_input_alone():
    kept = []
    pairs, weights = torch.randn(8, 12, requires_grad=True), torch.rand(8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda x: x):
        weighted_swiglu(pairs, weights)
    assert sum(kept) == 8 * 12 + 8


def test_norm_has_the_values_and_gradients_of_torchs():
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(6, 1, 3, 8, generator=generator, requires_grad=True)
    weight = torch.rand(8, generator=generator).requires_grad_()
    up = torch.randn(6, 1, 3, 8, generator=generator)
    plain = rms_norm(hidden, weight, 1e-6)
    kernel = _RmsNorm.apply(hidden, weight, 1e-6)
    torch.testing.assert_close(kernel, plain)
    grads = [torch.autograd.grad((out * up).sum(), (hidden, weight)) for out in (kernel, plain)]
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_kernels_of_the_logits_equal_the_arithmetic_in_place(with_entropy):
    generator = torch.Generator().manual_seed(2)
    logits = 5 * torch.randn(9, 50, generator=generator)
    logits[0, 3], logits[1, 7] = -float("inf"), 1e5
    targets = torch.randint(0, 50, (9,), generator=generator)
    heat = 0.5 + torch.rand(9, generator=generator)
    plain = _logits.statistics(logits.clone(), targets, heat)
    kernel = _logits._statistics.plain(logits.clone(), targets, heat)
    for one, two in zip(plain, kernel, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    _, highest, total, mean = plain
    norms, entropy = highest + total.log(), total.log() - mean / total
    up, up_entropy = torch.randn(9, generator=generator), torch.randn(9, generator=generator) if with_entropy else None
    rest = (targets, heat, norms, up, up_entropy, entropy, torch.float32)
    torch.testing.assert_close(
        _logits.gradient(logits.clone(), *rest), _logits._gradient.plain(logits.clone(), *rest), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_logprobs_and_entropies_in_chunks_equal_whole_logits(chunk):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(10, 8, generator=generator, requires_grad=True)
    head = torch.randn(30, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 30, (10,), generator=generator)
    heat = 0.5 + torch.rand(10, generator=generator)
    up, up_entropy = torch.randn(2, 10, generator=generator)

    logp = ((hidden @ head.t()) / heat[:, None]).log_softmax(-1)
    whole = logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)
    parts = token_logprobs(hidden, head, targets, heat, chunk)
    for one, two in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad((a * up + b * up_entropy).sum(), (hidden, head)) for a, b in (parts, whole)]
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_logits_never_exist_whole():
    biggest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal biggest
            out = func(*args, **(kwargs or {}))
            biggest = max(biggest, out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    hidden, head = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with Watch():
        logprobs, _ = token_logprobs(hidden, head, torch.zeros(64, dtype=torch.int64), torch.ones(64), chunk=8)
        logprobs.sum().backward()
    assert biggest == 8 * 1000


def test_adam_has_its_step_count_where_its_kernel_needs_it():
    from vime_trainer.optim._megatron import choose_kernel

    param = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.AdamW([param], fused=True)
    param.grad = torch.ones(3)
    adam.step()
    choose_kernel(adam)
    assert adam.param_groups[0]["fused"] is None and adam.state[param]["step"].device.type == "cpu"
    adam.step()
    assert adam.state[param]["step"] == 2
