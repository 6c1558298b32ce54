"""The value model: the same weights and tokens in transformers, folders, training."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from vime_trainer import value
from vime_trainer.optim import Optimizer, OptimizerSettings
from vime_trainer.packed import pack
from vime_trainer.value import CriticSettings, ValueModel

LENGTHS = (11, 5, 23, 1, 2)


def test_public_names():
    assert sorted(value.__all__) == ["CriticSettings", "ValueModel", "ValueOutputs", "critic_weights"]
    assert CriticSettings().optimizer.learning_rate == 1e-5


def sequences(vocab: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_values_and_gradients_equal_transformers(hf_folder, layout):
    from transformers import AutoModel

    critic = ValueModel.from_hf(hf_folder, layout=layout, head_std=0.3, seed=4)
    rows = sequences(critic.arch.vocab)
    batch = pack(rows, temperature=0.5)
    got = critic(batch).values
    model = AutoModel.from_pretrained(hf_folder, dtype=torch.float32, attn_implementation="eager")
    head = dict(critic.hf_tensors())["score.weight"].clone().requires_grad_()
    want = []
    for row in rows:
        hidden = model(row[None]).last_hidden_state[0]
        # The value at token i is that of the tokens before it.
        want += [torch.zeros(1), (hidden[:-1] @ head.T).squeeze(1)]
    want = torch.cat(want)
    assert (got - want).abs().max() < 1e-5
    assert got.std() > 0.1

    up = torch.randn(batch.total, generator=torch.Generator().manual_seed(6))
    (up * got).sum().backward()
    (up * want).sum().backward()
    ours = critic.parameters()
    torch.testing.assert_close(ours["output_layer.weight"].grad, head.grad, rtol=1e-4, atol=1e-4)
    mine, theirs = ours["embedding.word_embeddings.weight"].grad, model.get_input_embeddings().weight.grad
    assert (mine - theirs).abs().max() < 2e-4 * theirs.abs().max()


def test_a_new_head_values_all_prefixes_alike(moe_folder):
    critic = ValueModel.from_hf(moe_folder)
    assert not critic(pack(sequences(critic.arch.vocab))).values.any()
    assert "lm_head.weight" not in critic.hf_specs() and critic.hf_specs()["score.weight"] == (1, critic.arch.hidden)


def test_wanted_tokens_alone_have_values(moe_folder):
    critic = ValueModel.from_hf(moe_folder, head_std=0.3)
    batch = pack(sequences(critic.arch.vocab))
    wanted = torch.arange(batch.total) % 3 == 0
    some, every = critic(batch, wanted).values, critic(batch).values
    assert torch.equal(some, every.masked_fill(~wanted, 0.0))
    (again,) = critic.run([batch], [wanted])
    assert torch.equal(again.values, some) and not again.values.requires_grad


def test_a_critic_is_saved_and_read_again_and_by_transformers(moe_folder, tmp_path):
    from transformers import AutoModelForSequenceClassification

    critic = ValueModel.from_hf(moe_folder, head_std=0.3, seed=1)
    folder = critic.save_hf(tmp_path / "critic")
    again = ValueModel.from_hf(folder, head_std=9.0, seed=2)
    batch = pack(sequences(critic.arch.vocab))
    assert torch.equal(again(batch).values, critic(batch).values)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForSequenceClassification"]
    scored = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    row = sequences(critic.arch.vocab)[0]
    # transformers scores whole sequences: the value of the prefix before a token that follows.
    after = critic(pack([torch.cat([row, row[:1]])])).values[-1]
    assert scored(row[None]).logits.item() == pytest.approx(after.item(), abs=1e-5)


def test_a_missing_tensor_is_refused_by_name(moe_folder, tmp_path):
    tensors = load_file(moe_folder / "model.safetensors")
    for name, message in (("model.norm.weight", "model.norm.weight"), ("lm_head.weight", None)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((moe_folder / "config.json").read_bytes())
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, folder / "model.safetensors")
        if message is None:
            ValueModel.from_hf(folder)
        else:
            with pytest.raises(ValueError, match=message):
                ValueModel.from_hf(folder)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_bytes((moe_folder / "config.json").read_bytes())
    odd = {**tensors, "score.weight": torch.zeros(2, 64)}
    save_file(odd, tmp_path / "odd" / "model.safetensors")
    with pytest.raises(ValueError, match=r"score.weight: shape \(2, 64\); the model needs \(1, 64\)"):
        ValueModel.from_hf(tmp_path / "odd")


def test_a_critic_learns_returns(moe_folder):
    critic = ValueModel.from_hf(moe_folder)
    optimizer = Optimizer(critic, OptimizerSettings(learning_rate=3e-3), total_updates=None)
    rows = sequences(critic.arch.vocab)
    batches = [pack(rows[:2]), pack(rows[2:])]
    returns = [(batch.tokens % 2).float() for batch in batches]
    wanted = [batch.positions > 0 for batch in batches]
    count = sum(int(mask.sum()) for mask in wanted)
    losses = []
    for _ in range(30):
        total = []

        def loss(i, outputs, total=total):
            term = 0.5 * ((outputs.values - returns[i]) ** 2)[wanted[i]].sum() / count
            total.append(term.item())
            return term

        optimizer.zero_grad()
        critic.run(batches, wanted, loss)
        assert optimizer.step().applied
        losses.append(sum(total))
    start = 0.5 * sum(float(r[m].sum()) for r, m in zip(returns, wanted, strict=True)) / count
    assert losses[0] == pytest.approx(start, rel=1e-4)
    assert losses[-1] < 0.2 * losses[0]
