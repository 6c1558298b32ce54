"""The same code on a GPU: float32 by SDPA, bfloat16 by the varlen and grouped kernels, recompute, replay, resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests_support import make_folder

from vime_proto.version import policy_version
from vime_trainer.checkpoint import RunState, load_checkpoint, save_checkpoint
from vime_trainer.fused import switches
from vime_trainer.optim import Optimizer, OptimizerSettings
from vime_trainer.packed import ReplayRows, pack
from vime_trainer.policy import Policy
from vime_trainer.policy._logprobs import token_logprobs
from vime_trainer.publish import MemoryStore, spool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = (11, 11, 5, 40, 1, 2)


def rows():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 61, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_tied", "qwen3_moe", "glm4_moe"])
def folder(request, tmp_path_factory):
    return make_folder(request.param, tmp_path_factory.mktemp(request.param))


def reference(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parts = []
    for row in rows():
        logp = model(row[None]).logits[0].log_softmax(-1)[:-1]
        parts += [torch.zeros(1), logp.gather(1, row[1:, None]).squeeze(1)]
    return torch.cat(parts).detach()


def gradients(policy, batch):
    for param in policy.parameters().values():
        param.grad = None
    out = policy(batch)
    (out.logprobs + 0.1 * out.entropy).sum().backward()
    grads = {name: param.grad.float().clone() for name, param in policy.parameters().items()}
    return out.logprobs.detach().cpu(), grads


def difference(one, two):
    """Relative to the size of the gradient."""
    return max(float((one[name] - two[name]).norm() / two[name].norm().clamp(min=1e-2)) for name in one)


def test_float32_equals_transformers(folder):
    got = Policy.from_hf(folder)(pack(rows())).logprobs.cpu()
    assert (got - reference(folder)).abs().max() < 1e-5


def test_bfloat16_kernels_are_close_to_float32_in_values_and_gradients(folder):
    batch = pack(rows())
    exact, exact_grads = gradients(Policy.from_hf(folder), batch)
    rough, rough_grads = gradients(Policy.from_hf(folder, dtype="bfloat16"), batch)
    assert (rough - exact).abs().mean() < 0.06
    dense = [name for name in exact_grads if "expert" not in name and "router" not in name]
    assert difference({n: rough_grads[n] for n in dense}, {n: exact_grads[n] for n in dense}) < 0.35


def test_sequences_do_not_see_one_another_in_the_packed_kernel(folder):
    policy = Policy.from_hf(folder, dtype="bfloat16")
    together = policy(pack(rows())).logprobs.cpu()
    alone = torch.cat([policy(pack([row])).logprobs.cpu() for row in rows()])
    assert (together - alone).abs().mean() < 0.02


def test_recompute_gives_the_same_gradient_also_with_replay(tmp_path):
    folder = make_folder("qwen3_moe", tmp_path)
    batch = pack(rows())
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(8, dtype=np.uint8), (batch.total, 2, 1)), axis=2)[..., :2]
    given = pack(rows(), routes=ReplayRows(ids, np.ones(batch.total, bool), (0, 2)))
    for use in (batch, given):
        plain, grads = gradients(Policy.from_hf(folder, replay=True), use)
        again, regrads = gradients(Policy.from_hf(folder, recompute=True, replay=True), use)
        assert (plain - again).abs().max() < 1e-5
        assert difference(regrads, grads) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_trains_and_resumes(folder, tmp_path, dtype):
    def make():
        policy = Policy.from_hf(folder, dtype)
        return policy, Optimizer(policy, OptimizerSettings(learning_rate=1e-3))

    def train(policy, optimizer, steps):
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = -policy(pack(rows())).logprobs.sum() / 64
            loss.backward()
            assert optimizer.step().applied
            losses.append(loss.item())
        return losses

    policy, optimizer = make()
    first = train(policy, optimizer, 10)
    path = save_checkpoint(tmp_path, policy, optimizer, RunState(10))
    rest = train(policy, optimizer, 5)
    other, again = make()
    load_checkpoint(path, other, again)
    assert train(other, again, 5) == pytest.approx(rest, rel=0.02)
    assert rest[-1] < 0.8 * first[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_compute_what_the_plain_ways_do(folder, dtype, monkeypatch):
    batch = pack(rows(), temperature=[1.0, 0.7, 1.0, 1.3, 1.0, 1.0])
    fast, grads = gradients(Policy.from_hf(folder, dtype), batch)
    for name in ("swiglu", "norm", "rope", "dispatch", "logprobs"):
        monkeypatch.setattr(switches, name, False)
    plain, plain_grads = gradients(Policy.from_hf(folder, dtype), batch)
    limit = 1e-5 if dtype == "float32" else 0.05
    assert (fast - plain).abs().mean() < limit
    dense = [name for name in grads if "expert" not in name and "router" not in name]
    assert difference({n: grads[n] for n in dense}, {n: plain_grads[n] for n in dense}) < (
        1e-4 if dtype == "float32" else 0.3
    )


@pytest.mark.parametrize("with_entropy", [False, True])
def test_head_in_bfloat16_has_the_gradient_of_whole_logits(with_entropy):
    make = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(300, 64, generator=make, device="cuda").bfloat16().requires_grad_()
    head = (0.1 * torch.randn(1000, 64, generator=make, device="cuda")).bfloat16().requires_grad_()
    targets = torch.randint(0, 1000, (300,), generator=make, device="cuda")
    up = torch.rand(300, generator=make, device="cuda")

    logp = (hidden.float() @ head.float().t()).log_softmax(-1)
    whole = logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)
    parts = token_logprobs(hidden, head, targets, torch.ones(300, device="cuda"), chunk=128)
    grads = []
    for values, entropy in (parts, whole):
        loss = (values * up).sum() + (0.1 * entropy.sum() if with_entropy else 0.0)
        grads.append(torch.autograd.grad(loss, (hidden, head), retain_graph=True))
    assert (parts[0] - whole[0]).abs().max() < 1e-3 and (parts[1] - whole[1]).abs().max() < 1e-3
    for one, two in zip(*grads, strict=True):
        assert (one.float() - two.float()).norm() < 0.02 * two.float().norm()


def test_batches_of_many_lengths_run_through_the_same_kernels(tmp_path):
    policy = Policy.from_hf(make_folder("qwen3_moe", tmp_path), dtype="bfloat16")
    for length in (17, 40, 3, 90):
        batch = pack([torch.arange(length) % 61, torch.arange(5)])
        together, _ = gradients(policy, batch)
        alone = policy(pack([torch.arange(length) % 61])).logprobs.detach().cpu()
        assert (together[:length] - alone).abs().mean() < 0.02


def test_weights_leave_the_gpu_with_the_bytes_that_they_have_there():
    generator = torch.Generator().manual_seed(3)
    types = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn)
    here = [(f"w{i}", torch.randn(37, 129, generator=generator).to(types[i % 4])) for i in range(40)]
    here = [(name, tensor.T if i % 3 else tensor) for i, (name, tensor) in enumerate(here)]
    there = [(name, tensor.cuda()) for name, tensor in here]
    found = []
    # The second time comes through memory that torch kept pinned.
    for tensors in (here, there, there):
        store = MemoryStore()
        manifest = spool("u", policy_version("run", 0, 1), tensors, 100_000, store)
        count = len(manifest.sources[0].chunks)
        found.append((manifest, [b"".join(p for _, p in store.read("u", "rank-0", i, 1 << 20)) for i in range(count)]))
    assert len(found[0][1]) > 3
    assert found[0] == found[1] == found[2]
    there[20][1][0, 5] = float("nan")
    with pytest.raises(ValueError, match=f"'{there[20][0]}' holds a value that is not finite"):
        spool("u", policy_version("run", 0, 1), there, 100_000, MemoryStore())
