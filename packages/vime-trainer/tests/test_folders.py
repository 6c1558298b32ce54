"""Hugging Face folders: bit-exact round trips, and one clear error for each thing that does not fit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from vime_trainer.models import HfConfig, family_of, read_config
from vime_trainer.policy import Policy


def weights_of(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def copy_with(folder, target, change):
    """A copy of a folder whose weights went through `change`."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    save_file(change(weights), target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_round_trip_is_bit_exact_and_keeps_side_files(hf_folder, tmp_path):
    source = shutil.copytree(hf_folder, tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    policy = Policy.from_hf(source)
    policy.save_hf(tmp_path / "out")
    want, got = weights_of(source), weights_of(tmp_path / "out")
    assert want.keys() == got.keys() == policy.hf_specs().keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert {name: tuple(value.shape) for name, value in got.items()} == policy.hf_specs()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_shards_load_in_transformers(moe_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    policy = Policy.from_hf(moe_folder)
    policy.save_hf(tmp_path / "out", max_shard_bytes=100_000)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    two = AutoModelForCausalLM.from_pretrained(moe_folder, dtype=torch.float32)
    tokens = torch.arange(12)[None]
    assert torch.equal(one(tokens).logits, two(tokens).logits)
    again = Policy.from_hf(tmp_path / "out")
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters().values(), policy.parameters().values(), strict=True)
    )


def test_exporting_over_a_folder_replaces_it(dense_folder, tmp_path):
    policy = Policy.from_hf(dense_folder)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale.safetensors").write_bytes(b"old")
    policy.save_hf(tmp_path / "out")
    assert not (tmp_path / "out" / "stale.safetensors").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_missing_tensor_is_named(moe_folder, tmp_path):
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    folder = copy_with(moe_folder, tmp_path / "m", lambda w: {k: v for k, v in w.items() if k != name})
    with pytest.raises(ValueError, match=f"1 tensors are missing, the first is '{name}'"):
        Policy.from_hf(folder)


def test_extra_tensor_is_named_with_the_nearest_valid_name(dense_folder, tmp_path):
    folder = copy_with(
        dense_folder, tmp_path / "m", lambda w: w | {"model.layers.0.mlp.gat_proj.weight": torch.ones(1)}
    )
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.gat_proj\.weight'; did you mean .*gate_proj"):
        Policy.from_hf(folder)


def test_wrong_shape_is_named(dense_folder, tmp_path):
    folder = copy_with(dense_folder, tmp_path / "m", lambda w: w | {"model.norm.weight": torch.ones(65)})
    with pytest.raises(ValueError, match=r"tensor model\.norm\.weight: shape \(65,\); the model needs \(64,\)"):
        Policy.from_hf(folder)


def test_a_tied_checkpoint_may_hold_its_head_too(tmp_path):
    from tests_support import make_folder

    folder = make_folder("qwen3_tied", tmp_path / "tied")
    with_head = copy_with(
        folder, tmp_path / "m", lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"].clone()}
    )
    assert "lm_head.weight" not in Policy.from_hf(with_head).hf_specs()


def test_no_weights_and_no_config_are_named(dense_folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json at .*nowhere"):
        Policy.from_hf(tmp_path / "nowhere")
    shutil.copy(dense_folder / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors file"):
        Policy.from_hf(tmp_path)


def test_older_config_keys_mean_the_same(moe_folder):
    new = read_config(moe_folder)
    old = dict(new.values)
    old["num_experts"] = old.pop("num_local_experts", None) or old.get("num_experts")
    old["rope_theta"] = old.pop("rope_parameters")["rope_theta"]
    old["torch_dtype"] = old.pop("dtype", "float32")
    family = family_of(new)
    assert family.architecture(HfConfig(old)) == family.architecture(new)
    assert family.architecture(new).moe_layers == {0, 2}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", "gelu", "hidden_act 'gelu' is not supported; valid: 'silu'"),
        ("attention_bias", True, "attention_bias True"),
        ("use_sliding_window", True, "use_sliding_window True"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4}, "rope_type 'yarn'"),
        ("num_key_value_heads", 3, "num_attention_heads: 4 is no multiple"),
        ("hidden_size", None, "no key 'hidden_size'"),
    ],
)
def test_what_the_family_does_not_compute_is_refused(dense_folder, key, value, message):
    config = read_config(dense_folder)
    with pytest.raises(ValueError, match=message):
        family_of(config).architecture(HfConfig(config.values | {key: value}))


def test_unknown_family_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown name 'qwen3_mo'; did you mean 'qwen3_moe'\?"):
        family_of(HfConfig({"model_type": "qwen3_mo"}))


def test_unknown_dtype_and_layout_name_the_valid_ones(dense_folder):
    with pytest.raises(ValueError, match="dtype: .*'float16'.*valid: bfloat16, float32"):
        Policy.from_hf(dense_folder, dtype="float16")
    with pytest.raises(ValueError, match="layout: .*'paded'.*did you mean 'padded'"):
        Policy.from_hf(dense_folder, layout="paded")


def test_random_weights_depend_on_seed_and_name_alone(moe_folder):
    one, same, other = (Policy.from_config(moe_folder, seed=seed) for seed in (4, 4, 5))
    first, again, differs = (dict(policy.hf_tensors()) for policy in (one, same, other))
    assert all(torch.equal(first[name], again[name]) for name in first)
    matrices = [name for name, value in first.items() if value.dim() > 1]
    assert not any(torch.equal(first[name], differs[name]) for name in matrices)
    everything = torch.cat([first[name].flatten() for name in matrices])
    assert everything.std() == pytest.approx(0.1, rel=0.02)
    assert all(bool((value == 1).all()) for name, value in first.items() if value.dim() == 1)


def test_experts_of_a_layer_follow_one_another(moe_folder):
    names = [name for name, _ in Policy.from_hf(moe_folder).hf_tensors()]
    for layer in (0, 2):
        places = [i for i, name in enumerate(names) if f"layers.{layer}.mlp.experts." in name]
        assert places == list(range(places[0], places[0] + 24))
