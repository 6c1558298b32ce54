"""GLM-4.5: what its folders hold besides the model, its float32 bias of the choice of experts, and replay with it."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vime_trainer import cli
from vime_trainer.checkpoint import RunState, save_checkpoint
from vime_trainer.models import HfConfig, family_of, read_config
from vime_trainer.optim import Optimizer, OptimizerSettings
from vime_trainer.packed import ReplayRows, pack
from vime_trainer.policy import Policy

BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


def changed(folder, target, change, **config):
    """A copy of a folder with other weights and keys of config.json."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    save_file(change(weights), target / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | config))
    return target


def rows(count=3):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 61, (length,), generator=generator) for length in (9, 6, 9)[:count]]


def behind(weights):
    """Adds the layer for multi-token prediction as published folders hold it."""
    return weights | {
        "model.layers.3.eh_proj.weight": torch.ones(64, 128),
        "model.layers.3.mlp.gate.weight": torch.ones(8, 64),
        "model.layers.3.shared_head.norm.weight": torch.ones(64),
    }


def test_layers_for_multi_token_prediction_are_left_out_and_said_to_be(glm_folder, tmp_path):
    folder = changed(glm_folder, tmp_path / "m", behind)
    policy = Policy.from_hf(folder)
    assert policy.hf_specs() == Policy.from_hf(glm_folder).hf_specs()
    policy.save_hf(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == policy.hf_specs().keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert read_config(folder).values["num_nextn_predict_layers"] == 1


def test_more_layers_than_the_config_says_are_refused(glm_folder, tmp_path):
    folder = changed(glm_folder, tmp_path / "m", behind, num_nextn_predict_layers=0)
    with pytest.raises(
        ValueError, match=r"3 tensors do not belong to the model: .*'model\.layers\.3\.eh_proj\.weight'"
    ):
        Policy.from_hf(folder)


@pytest.mark.parametrize(
    "name", [BIAS.format(2), "model.layers.1.mlp.shared_experts.up_proj.weight", "model.layers.0.self_attn.k_proj.bias"]
)
def test_a_missing_bias_or_shared_expert_is_named(glm_folder, tmp_path, name):
    folder = changed(glm_folder, tmp_path / "m", lambda w: {k: v for k, v in w.items() if k != name})
    with pytest.raises(ValueError, match=f"1 tensors are missing, the first is '{name}'"):
        Policy.from_hf(folder)


def test_the_bias_stays_in_float32_and_training_leaves_it(glm_folder, tmp_path):
    policy = Policy.from_hf(glm_folder, dtype="bfloat16")
    want = {name: value for name, value in load_file(glm_folder / "model.safetensors").items() if "correction" in name}
    optimizer = Optimizer(policy, OptimizerSettings(learning_rate=1e-2))
    before = policy.weights()["decoder.layers.1.mlp.router.weight"].clone()
    for _ in range(2):
        policy(pack(rows())).logprobs.sum().backward()
        optimizer.step()
    assert not torch.equal(policy.weights()["decoder.layers.1.mlp.router.weight"], before)
    sent = dict(policy.hf_tensors())
    for layer in (1, 2):
        name = BIAS.format(layer)
        assert sent[name].dtype == torch.float32 and torch.equal(sent[name], want[name])
        assert not torch.equal(want[name], want[name].bfloat16().float())  # the type matters
    assert {value.dtype for name, value in sent.items() if name not in want} == {torch.bfloat16}
    policy.save_hf(tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[BIAS.format(2)], want[BIAS.format(2)])


def test_a_checkpoint_holds_the_bias_and_exports_it(glm_folder, tmp_path, capsys):
    policy = Policy.from_hf(glm_folder)
    with torch.no_grad():
        for value in policy.weights().values():
            value.add_(0.25)
    save_checkpoint(tmp_path / "run", policy, Optimizer(policy, OptimizerSettings()), RunState(1))
    command = ["export", "--model", glm_folder, "--checkpoint", tmp_path / "run", "--output", tmp_path / "out"]
    assert cli.main([str(word) for word in command]) == 0, capsys.readouterr().err
    found = load_file(tmp_path / "out" / "model.safetensors")
    want = dict(policy.hf_tensors())
    assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)
    original = load_file(glm_folder / "model.safetensors")
    assert all(torch.equal(found[name], original[name] + 0.25) for name in (BIAS.format(1), BIAS.format(2)))


def test_random_weights_have_no_bias(glm_folder):
    tensors = dict(Policy.from_config(glm_folder).hf_tensors())
    assert not any(value.any() for name, value in tensors.items() if name.endswith("bias"))
    assert tensors["model.layers.1.mlp.shared_experts.up_proj.weight"].std() == pytest.approx(0.1, rel=0.05)


def test_older_config_keys_mean_the_same(glm_folder):
    new = read_config(glm_folder)
    old = dict(new.values)
    old |= {"rope_theta": old.pop("rope_parameters")["rope_theta"], "partial_rotary_factor": 0.5, "rope_scaling": None}
    family = family_of(new)
    assert family.architecture(HfConfig(old)) == family.architecture(new)
    assert family.architecture(new).moe_layers == {1, 2} and family.architecture(new).shared_ffn == 96


def test_absent_keys_mean_what_transformers_takes_them_for(glm_folder):
    values = dict(read_config(glm_folder).values)
    width = values["moe_intermediate_size"]
    del values["n_shared_experts"]
    assert family_of(HfConfig(values)).architecture(HfConfig(values)).shared_ffn == width
    dense = {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 2}
    dense |= {"vocab_size": 64, "intermediate_size": 128, "num_key_value_heads": 8}
    assert family_of(HfConfig(dense)).architecture(HfConfig(dense)).head_dim == 128


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n_group", 2, "n_group 2 is not supported; valid: 1"),
        ("topk_group", 2, "topk_group 2 is not supported; valid: 1"),
        ("norm_topk_prob", False, "norm_topk_prob False is not supported; valid: True"),
        ("rope_parameters", {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5; valid: above 0, at most 1"),
    ],
)
def test_what_is_not_computed_is_refused(glm_folder, key, value, message):
    config = read_config(glm_folder)
    with pytest.raises(ValueError, match=message):
        family_of(config).architecture(HfConfig(config.values | {key: value}))


def forced(model, ids):
    """Makes transformers' routers choose `ids` [tokens, layers, top_k], by the model's own formula for the weights."""

    def choose(layer):
        def hook(router, _inputs, output):
            scores = output[0].sigmoid()
            weights = scores.gather(1, ids[:, layer])
            return output[0], router.routed_scaling_factor * weights / weights.sum(1, keepdim=True), ids[:, layer]

        return hook

    for layer in (1, 2):
        model.model.layers[layer].mlp.gate.register_forward_hook(choose(layer - 1))


def test_replay_gives_the_forced_experts_their_own_normalised_and_scaled_scores(glm_folder):
    """Against transformers with the same forced ids; the trainer's bias is another one, and must not matter."""
    from transformers import AutoModelForCausalLM

    tokens = rows(1)[0]
    generator = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.rand(9, 8, generator=generator).argsort(1)[:, :2] for _ in (1, 2)], dim=1)
    model = AutoModelForCausalLM.from_pretrained(glm_folder, dtype=torch.float32, attn_implementation="eager")
    forced(model, ids)
    want = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
    want.sum().backward()

    policy = Policy.from_hf(glm_folder, replay=True)
    assert policy.replay.layer_ids == (1, 2)
    routes = ReplayRows(ids.numpy().astype(np.uint8), np.ones(9, bool), (1, 2), measure=True)
    batch = dataclasses.replace(pack([tokens]), routes=routes)
    with torch.no_grad():
        for router in policy.router_modules().values():
            router.expert_bias += torch.randn(8, generator=generator)
    got = policy(batch)
    assert (got.logprobs[1:] - want).abs().max() < 1e-5
    assert got.usage.flips.sum() > 0  # the model alone would have chosen other experts
    got.logprobs.sum().backward()
    for layer, router in policy.router_modules().items():
        theirs = model.model.layers[layer].mlp.gate.weight.grad
        assert (router.weight.grad - theirs).abs().max() < 2e-4 * theirs.abs().max()


def test_scoring_replays_the_routes_that_a_row_brings(glm_folder, tmp_path, capsys):
    rolled = changed(
        glm_folder,
        tmp_path / "rolled",
        lambda w: {name: value.roll(3).clone() if "correction" in name else value for name, value in w.items()},
    )
    policy = Policy.from_hf(glm_folder, replay=True)
    tokens = rows(1)[0]
    with torch.no_grad(), policy.replay.record() as taken:
        want = policy(pack([tokens])).logprobs
    routes = torch.stack(list(taken), dim=1)[:-1].tolist()
    data = tmp_path / "tokens.jsonl"
    plain = {"tokens": tokens.tolist()}
    data.write_text("".join(json.dumps(row) + "\n" for row in (plain, plain | {"routes": routes}, {"tokens": [1]})))
    assert cli.main(["logprobs", "--model", str(rolled), "--data", str(data)]) == 0
    own, replayed, _ = (torch.tensor(json.loads(line)["logprobs"][1:]) for line in capsys.readouterr().out.splitlines())
    assert (replayed - want[1:]).abs().max() < 1e-5 and (own - want[1:]).abs().max() > 1e-3
    data.write_text(json.dumps(plain | {"routes": routes[1:]}) + "\n")
    assert cli.main(["logprobs", "--model", str(rolled), "--data", str(data)]) == 1
    assert "routes: of shape [7, 2, 2]; the tokens and the model need [8, 2, 2]" in capsys.readouterr().err


def test_the_bias_alone_changes_the_live_choice_and_not_the_replayed_result(glm_folder):
    policy = Policy.from_hf(glm_folder, replay=True)
    batch = pack(rows())
    with torch.no_grad(), policy.replay.record() as taken:
        live = policy(batch).logprobs
    ids = torch.stack(list(taken), dim=1).numpy().astype(np.uint8)
    replayed = dataclasses.replace(batch, routes=ReplayRows(ids, np.ones(len(ids), bool), (1, 2)))
    with torch.no_grad():
        engine = policy(replayed).logprobs
        assert (engine - live).abs().max() < 2e-6
        for router in policy.router_modules().values():
            router.expert_bias.copy_(router.expert_bias.roll(3))
        assert (policy(batch).logprobs - live).abs().max() > 1e-3
        assert torch.equal(policy(replayed).logprobs, engine)
