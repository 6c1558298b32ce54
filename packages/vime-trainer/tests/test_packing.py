"""How a batch is laid out or cut changes neither outputs nor gradients; what is not asked for costs nothing."""

from __future__ import annotations

import pytest
import torch

from vime_trainer.megatron._layout import layout_of
from vime_trainer.packed import PackedBatch, pack
from vime_trainer.policy import Policy


def rows(lengths, vocab=61):
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]


def gradients(policy, batches, weights):
    """Summed gradient of the weighted log-probs of several batches, and the log-probs."""
    for param in policy.parameters().values():
        param.grad = None
    outputs = []
    for batch, weight in zip(batches, weights, strict=True):
        out = policy(batch)
        ((out.logprobs + 0.2 * out.entropy) * weight).sum().backward()
        outputs.append(out.logprobs.detach())
    return torch.cat(outputs), {name: param.grad.clone() for name, param in policy.parameters().items()}


@pytest.mark.parametrize("lengths", [(9, 9, 9), (3, 12, 7, 12), (40, 2, 2, 3, 1, 40), (5,)])
def test_packed_padded_and_one_by_one_agree(moe_folder, lengths):
    packed, padded = Policy.from_hf(moe_folder), Policy.from_hf(moe_folder, layout="padded")
    sequences = rows(lengths)
    together = pack(sequences)
    weight = torch.randn(together.total, generator=torch.Generator().manual_seed(9))
    parts = list(weight.split(list(lengths)))
    want, want_grads = gradients(packed, [pack([row]) for row in sequences], parts)
    for policy in (packed, padded):
        got, got_grads = gradients(policy, [together], [weight])
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
        for name, grad in want_grads.items():
            scale = float(grad.abs().max().clamp(min=1e-3))
            torch.testing.assert_close(got_grads[name], grad, rtol=0, atol=2e-5 * scale, msg=name)


def test_padding_values_change_nothing(moe_folder, monkeypatch):
    """Filler tokens other than 0 leave every bit as it is."""
    from vime_trainer.policy import _layouts

    policy = Policy.from_hf(moe_folder, layout="padded")
    batch = pack(rows((4, 11, 6)))
    want = policy(batch).logprobs
    monkeypatch.setattr(_layouts, "_FILLER", 37)
    got = policy(batch).logprobs
    # Expert shares change with the filler, so sums may round differently, but no value may leak in.
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


def test_equal_shapes_give_equal_bits(moe_folder):
    policy = Policy.from_hf(moe_folder)
    batch = pack(rows((7, 11, 3)))
    with torch.no_grad():
        scored = policy(batch).logprobs
    assert torch.equal((policy(batch).logprobs - scored).exp(), torch.ones(batch.total))


def test_only_wanted_tokens_have_values(dense_folder):
    policy = Policy.from_hf(dense_folder)
    batch = pack(rows((6, 5)))
    everything = policy(batch)
    wanted = torch.tensor([True, False, True, True, False, False, True, True, False, False, False])
    some = policy(batch, wanted)
    kept = wanted & (batch.positions > 0)
    torch.testing.assert_close(some.logprobs[kept], everything.logprobs[kept], rtol=0, atol=1e-6)
    assert bool((some.logprobs[~kept] == 0).all()) and bool((some.entropy[~kept] == 0).all())
    assert bool((everything.logprobs[batch.positions == 0] == 0).all())


def test_a_batch_without_a_wanted_token_has_a_zero_gradient(moe_folder):
    policy = Policy.from_hf(moe_folder)
    for batch, wanted in ((pack(rows((4, 3))), torch.zeros(7, dtype=torch.bool)), (pack(rows((1, 1))), None)):
        out = policy(batch, wanted)
        assert out.logprobs.tolist() == [0.0] * batch.total
        out.logprobs.sum().backward()
        assert all(param.grad is None or not param.grad.any() for param in policy.parameters().values())


def test_token_ids_beyond_the_vocabulary_are_refused(dense_folder):
    policy = Policy.from_hf(dense_folder)
    with pytest.raises(ValueError, match=r"ids from 3 to 61; valid: 0 to 60"):
        policy(pack([[3, 61]]))
    with pytest.raises(ValueError, match="ids from -1"):
        policy(pack([[3, -1]]))


def test_bad_batches_are_refused():
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        pack([[1], []])
    with pytest.raises(ValueError, match="temperature must be > 0"):
        pack([[1, 2]], 0.0)
    with pytest.raises(ValueError, match="2 temperatures for 1 sequences"):
        pack([[1, 2]], [1.0, 1.0])
    good = pack([[1, 2]])
    with pytest.raises(ValueError, match=r"PackedBatch\.temperature: 1 entries for 2 tokens"):
        PackedBatch(good.tokens, good.positions, good.cu_seqlens, torch.ones(1))
    with pytest.raises(ValueError, match=r"PackedBatch\.tokens: need a 1-d torch\.int64"):
        PackedBatch(good.tokens.int(), good.positions, good.cu_seqlens, good.temperature)


def test_attention_plan_covers_every_token_once():
    for lengths in ([3, 3], [9, 8, 9], [100, 1, 1, 2]):
        layout = layout_of(lengths, torch.device("cpu"), dense=True)
        total = sum(lengths)
        if layout.order is None:
            assert len(layout.blocks) == 1 and layout.blocks[0].rows is None
            continue
        cells = torch.cat([block.rows.flatten() for block in layout.blocks])
        assert cells[layout.order].tolist() == list(range(total))
        assert len(cells) <= 1.5 * total
