"""The optimizer against torch's own, and learning-rate schedules against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from vime_trainer.optim import Optimizer, OptimizerSettings, learning_rate
from vime_trainer.packed import pack
from vime_trainer.policy import Policy


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return pack([torch.randint(0, 61, (n,), generator=generator) for n in (8, 5)])


def loss_of(policy, seed):
    return -policy(batch(seed)).logprobs.sum() / 11


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_several_steps_equal_torch(moe_folder, kind):
    """Two micro-batches a step, clipping, weight decay on matrices only: parameters equal those of plain torch."""
    settings = OptimizerSettings(
        kind=kind, learning_rate=1e-2, beta1=0.8, beta2=0.9, weight_decay=0.3, clip_grad_norm=0.5, epsilon=1e-6
    )
    ours, plain = Policy.from_hf(moe_folder), Policy.from_hf(moe_folder)
    optimizer = Optimizer(ours, settings)
    params = list(plain.parameters().values())
    decayed, others = [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]
    cls = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    theirs = cls(
        [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    for step in range(4):
        optimizer.zero_grad()
        theirs.zero_grad()
        for part in (2 * step, 2 * step + 1):
            loss_of(ours, part).backward()
            loss_of(plain, part).backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
        theirs.step()
        result = optimizer.step()
        assert result.applied and result.clipped and result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for (name, mine), other in zip(ours.parameters().items(), params, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=3e-6, msg=name)
    assert optimizer.updates == 4


def test_unclipped_gradients_are_left_alone(dense_folder):
    policy = Policy.from_hf(dense_folder)
    free = Optimizer(policy, OptimizerSettings(clip_grad_norm=0.0))
    loss_of(policy, 0).backward()
    result = free.step()
    assert result.applied and not result.clipped and result.grad_norm > 0.1


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(dense_folder, poison):
    policy = Policy.from_hf(dense_folder)
    optimizer = Optimizer(policy, OptimizerSettings(learning_rate=1e-2, schedule="linear"), total_updates=10)
    loss_of(policy, 0).backward()
    optimizer.step()
    before = {name: param.detach().clone() for name, param in policy.parameters().items()}
    moments = {name: value.clone() for name, value in optimizer.state_tensors().items()}
    optimizer.zero_grad()
    (loss_of(policy, 1) * poison).backward()
    result = optimizer.step()
    assert not result.applied and (optimizer.skipped, optimizer.updates) == (1, 1)
    assert all(torch.equal(before[name], param) for name, param in policy.parameters().items())
    assert all(torch.equal(moments[name], value) for name, value in optimizer.state_tensors().items())
    optimizer.zero_grad()
    loss_of(policy, 1).backward()
    after = optimizer.step()
    assert after.applied and after.learning_rate == result.learning_rate


def test_master_weights_keep_updates_that_bfloat16_cannot_hold(dense_folder):
    policy = Policy.from_hf(dense_folder, dtype="bfloat16")
    optimizer = Optimizer(policy, OptimizerSettings(learning_rate=1e-5, beta1=0.0, clip_grad_norm=0.0))
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    weight = policy.parameters()[name]
    start = weight.detach().clone()
    master = optimizer.state_tensors()[f"{name}.master"]
    assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), start)
    first = master.clone()
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(policy, 0).backward()
        optimizer.step()
    assert (master - first).abs().max() > 2e-5
    assert torch.equal(weight, master.bfloat16())
    assert (weight == start).float().mean() > 0.5


def test_reloaded_weights_reach_the_master_copies(dense_folder):
    policy = Policy.from_hf(dense_folder, dtype="bfloat16")
    optimizer = Optimizer(policy, OptimizerSettings())
    with torch.no_grad():
        for param in policy.parameters().values():
            param.fill_(0.5)
    optimizer.reload_weights()
    masters = [value for name, value in optimizer.state_tensors().items() if name.endswith(".master")]
    assert masters and all(bool((value == 0.5).all()) for value in masters)


def test_a_policy_alone_has_no_optimizer_state(moe_folder):
    policy = Policy.from_hf(moe_folder)
    assert not any(hasattr(param, "main_grad") for param in policy.parameters().values())


def test_host_memory_without_a_gpu_changes_nothing_and_says_so(dense_folder, caplog):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    policies = [Policy.from_hf(dense_folder), Policy.from_hf(dense_folder)]
    for policy, offload in zip(policies, (False, True), strict=True):
        optimizer = Optimizer(policy, OptimizerSettings(learning_rate=1e-2, distributed=True, cpu_offload=offload))
        loss_of(policy, 0).backward()
        assert optimizer.step().applied
        with pytest.raises(ValueError, match="no tensors by parameter; use sharded_state_dict"):
            optimizer.state_tensors()
    assert "there is no GPU, so everything is in host memory already" in caplog.text
    for mine, other in zip(*(policy.parameters().values() for policy in policies), strict=True):
        assert torch.equal(mine, other)


def test_host_memory_is_for_the_optimizer_that_has_it():
    with pytest.raises(ValidationError, match="for kind 'adamw' alone"):
        OptimizerSettings(cpu_offload=True, distributed=True, kind="adam")
    with pytest.raises(ValidationError, match="for the distributed optimizer; set distributed"):
        OptimizerSettings(cpu_offload=True)


SCHEDULES = [
    ("constant", {}, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
    ("linear", {}, [0.5, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2]),
    ("cosine", {}, [0.5, 1, None, 0.8828427, None, 0.6, None, 0.3171573, None, 0.2, 0.2]),
    ("wsd", {"decay_updates": 4}, [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
]


@pytest.mark.parametrize(("schedule", "extra", "want"), SCHEDULES)
def test_schedules_by_hand(schedule, extra, want):
    """Peak 1, warm-up 2, ten updates, minimum 0.2; the eleventh is beyond the end."""
    settings = OptimizerSettings(learning_rate=1.0, schedule=schedule, warmup_updates=2, minimum_ratio=0.2, **extra)
    got = [learning_rate(settings, update, 10) for update in range(1, 12)]
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if b is not None]
    assert [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], abs=1e-6)
    assert all(later <= earlier + 1e-12 for earlier, later in zip(got[1:], got[2:], strict=False))


def test_the_demo_schedule_ends_at_five_percent():
    settings = OptimizerSettings(learning_rate=3e-3, schedule="linear", warmup_updates=50, minimum_ratio=0.05)
    assert learning_rate(settings, 1, 640) == pytest.approx(3e-3 / 50)
    assert learning_rate(settings, 50, 640) == 3e-3
    assert learning_rate(settings, 640, 640) == pytest.approx(1.5e-4)


def test_schedules_that_do_not_fit_are_refused(dense_folder):
    policy = Policy.from_hf(dense_folder)
    with pytest.raises(ValueError, match="schedule 'cosine' needs it when the run has no end"):
        Optimizer(policy, OptimizerSettings(schedule="cosine"))
    with pytest.raises(ValueError, match="warm-up and decay take 12 updates, the run has 10"):
        Optimizer(policy, OptimizerSettings(schedule="wsd", warmup_updates=8, decay_updates=4), 10)
    with pytest.raises(ValidationError, match="needed for schedule 'wsd'"):
        OptimizerSettings(schedule="wsd")
    with pytest.raises(ValidationError, match="for no other"):
        OptimizerSettings(decay_updates=3)
