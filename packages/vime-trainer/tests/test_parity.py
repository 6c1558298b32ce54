"""The same weights and tokens in transformers and in Megatron: log-probabilities, entropies and gradients."""

from __future__ import annotations

import pytest
import torch

from vime_trainer import models
from vime_trainer.packed import pack
from vime_trainer.policy import Policy

LENGTHS = (11, 11, 5, 40, 1, 2)
TEMPERATURES = (1.0, 0.7, 1.3, 1.0, 1.0, 2.0)


def sequences(vocab: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in LENGTHS]


def reference(folder, rows):
    """transformers' model and its log-probabilities and entropies, sequence by sequence without padding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logprobs, entropies = [], []
    for row, temperature in zip(rows, TEMPERATURES, strict=True):
        logp = (model(row[None]).logits[0] / temperature).log_softmax(-1)[:-1]
        logprobs += [torch.zeros(1), logp.gather(1, row[1:, None]).squeeze(1)]
        entropies += [torch.zeros(1), -(logp.exp() * logp).sum(-1)]
    return model, torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_logprobs_entropies_and_gradients_equal_transformers(hf_folder, layout):
    policy = Policy.from_hf(hf_folder, layout=layout)
    rows = sequences(policy.arch.vocab)
    model, logprobs, entropies = reference(hf_folder, rows)
    batch = pack(rows, TEMPERATURES)
    got = policy(batch)
    assert (got.logprobs - logprobs).abs().max() < 1e-5
    assert (got.entropy - entropies).abs().max() < 1e-5
    assert got.logprobs.std() > 0.5  # the figures are not all alike, so the comparison means something

    weights = torch.randn(batch.total, generator=torch.Generator().manual_seed(6))
    (weights * (got.logprobs + 0.3 * got.entropy)).sum().backward()
    (weights * (logprobs + 0.3 * entropies)).sum().backward()
    theirs = {name: param.grad for name, param in model.named_parameters()}
    ours = {name: param.grad for name, param in policy.parameters().items()}
    # Biases that only the choice of experts reads have no gradient.
    entries = [one for one in models.expand(policy.family.weights, policy.arch) if one.megatron in ours]
    assert {name for name in policy.weights() if name not in ours} == {
        f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in policy.arch.moe_layers if policy.arch.expert_bias
    }
    compared = 0
    for name, grad in models.export(entries, ours, policy.arch):
        if ".experts." in name:
            number = int(name.split(".experts.")[1].split(".")[0])
            prefix = name.split(".experts.")[0] + ".experts."
            if name.endswith("down_proj.weight"):
                want = theirs[prefix + "down_proj"][number]
            else:
                half = 0 if "gate_proj" in name else 1
                want = theirs[prefix + "gate_up_proj"][number].chunk(2)[half]
        else:
            want = theirs[name]
        scale = want.abs().max().clamp(min=1e-3)
        assert (grad - want).abs().max() < 2e-4 * scale, name
        compared += 1
    assert compared == sum(len(entry.hf) for entry in entries)


def test_one_temperature_by_hand():
    """Vocabulary of three, known logits, temperature 0.7."""
    from vime_trainer.policy import token_logprobs

    logits = torch.tensor([[1.0, 2.0, -1.0]])
    got, entropy = token_logprobs(logits, torch.eye(3), torch.tensor([1]), torch.tensor([0.7]))
    z = [value / 0.7 for value in (1.0, 2.0, -1.0)]
    total = sum(torch.tensor(value).double().exp() for value in z)
    probs = [float(torch.tensor(value).double().exp() / total) for value in z]
    assert got.item() == pytest.approx(torch.tensor(probs[1]).double().log().item(), abs=1e-6)
    want = -sum(p * torch.tensor(p).double().log().item() for p in probs)
    assert entropy.item() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_change_neither_values_nor_gradients(chunk):
    from vime_trainer.policy import token_logprobs

    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, dtype=torch.float32), torch.randn(11, 5)
    targets, temperature = torch.randint(0, 11, (7,)), torch.rand(7) + 0.5
    up, up_entropy = torch.randn(7), torch.randn(7)

    def run(function):
        a, b = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = function(a, b)
        (logprobs * up + entropy * up_entropy).sum().backward()
        return logprobs.detach(), entropy.detach(), a.grad, b.grad

    def plain(a, b):
        logp = (a @ b.t() / temperature[:, None]).log_softmax(-1)
        return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)

    want = run(plain)
    got = run(lambda a, b: token_logprobs(a, b, targets, temperature, chunk))
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_a_logit_of_minus_infinity_leaves_everything_finite():
    from vime_trainer.policy import token_logprobs

    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-torch.inf, 0.0]])
    weight[2, 1] = 0.0
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([1]), torch.ones(1))
    p = torch.tensor([1.0, 2.0]).softmax(0)
    assert logprobs.item() == pytest.approx(p[1].log().item(), abs=1e-6)
    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)
