"""Transformer Engine's names of weights, and when its layers are chosen; what they compute is in test_gpu_transformer_engine."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from vime_trainer import models
from vime_trainer.checkpoint._models import Trained, layouts_of
from vime_trainer.fused import switches
from vime_trainer.megatron import _build, _transformer_engine
from vime_trainer.megatron._transformer_engine import keeps_experts, wants_transformer_engine, why_missing
from vime_trainer.models import PerExpert, Place, stored_key, table_name, table_weights
from vime_trainer.policy import Policy
from vime_trainer.sft import SftSettings

LAYER = "decoder.layers.11."


@pytest.mark.parametrize(
    ("theirs", "ours", "expert"),
    [
        (LAYER + "self_attention.linear_qkv.layer_norm_weight", LAYER + "input_layernorm.weight", None),
        (LAYER + "mlp.linear_fc1.layer_norm_weight", LAYER + "pre_mlp_layernorm.weight", None),
        (LAYER + "mlp.experts.linear_fc1.weight0", LAYER + "mlp.experts.fc1", 0),
        (LAYER + "mlp.experts.linear_fc2.weight127", LAYER + "mlp.experts.fc2", 127),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight", None),
    ],
)
def test_a_parameter_has_the_name_of_the_table(theirs, ours, expert):
    assert table_name(theirs) == (ours, expert)


def their_name(name: str, moe: bool) -> str:
    """Where Transformer Engine's layers keep what is no expert's."""
    name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    return name if moe else name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


def their_parameters(table, arch, place):
    """Empty tensors with the names and shapes that models of Transformer Engine's layers have."""
    found = {}
    for entry in table:
        shape = models.local_shape(entry, arch, place)
        if entry.experts:
            name = entry.megatron.replace(".fc", ".linear_fc")
            # Registered in any order: numbers count, not places.
            found |= {f"{name}.weight{number}": torch.empty(shape[1:]) for number in reversed(range(shape[0]))}
        else:
            found[their_name(entry.megatron, entry.layer in arch.moe_layers)] = torch.empty(shape)
    return found


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "glm4_moe"])
def model(request, dense_folder, moe_folder, glm_folder):
    folder = {"qwen3": dense_folder, "qwen3_moe": moe_folder, "glm4_moe": glm_folder}[request.param]
    config = models.read_config(folder)
    family = models.family_of(config)
    arch = family.architecture(config)
    return folder, arch, models.expand(family.weights, arch)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("expert", [1, 2])
def test_a_folder_goes_through_their_parameters_and_back(model, tensor, expert):
    folder, arch, table = model
    expert = expert if arch.moe_layers else 1
    given = load_file(folder / "model.safetensors")
    places = [Place(t, tensor, e, expert) for e in range(expert) for t in range(tensor)]
    ranks = []
    for place in places:
        found = their_parameters(table, arch, place)
        assert len({table_name(name)[0] for name in found}) == len(table)
        models.fill(table, table_weights(found), arch, lambda name, box: given[name][box], place)
        ranks.append(table_weights(found))
    got = {}
    for entry in table:
        holders = [
            rank
            for rank, place in zip(ranks, places, strict=True)
            if (entry.experts or place.expert_rank == 0)
            and (place.tensor_rank == 0 or (entry.cut != "none" and not entry.experts))
        ]
        parts = [rank[entry.megatron].detach() for rank in holders]
        got |= dict(zip(entry.hf, models.join(entry, parts, arch, places[0]), strict=True))
    wanted = {name: value for name, value in given.items() if name in got}
    assert set(given) - set(got) == set() and all(torch.equal(got[name], value) for name, value in wanted.items())


def test_names_of_the_tables_stay_as_they_are(model):
    _, _, table = model
    assert all(table_name(entry.megatron) == (entry.megatron, None) for entry in table)
    weights = {entry.megatron: torch.zeros(1) for entry in table}
    assert table_weights(weights) == weights


def test_experts_are_seen_as_one_weight():
    parts = [torch.full((2, 3), float(number)) for number in range(12)]
    found = {f"{LAYER}mlp.experts.linear_fc1.weight{number}": part for number, part in enumerate(parts)}
    (stacked,) = table_weights(dict(sorted(found.items()))).values()
    assert stacked.shape == (12, 2, 3) and stacked.nbytes == 12 * 6 * 4
    assert stacked.detach()[:, 0, 0].tolist() == list(range(12))
    stacked.copy_(torch.arange(72.0).view(12, 2, 3))
    assert parts[11][1].tolist() == [69.0, 70.0, 71.0]
    other = PerExpert([torch.zeros(2, 3) for _ in range(12)]).copy_(stacked)
    assert torch.equal(other.detach(), stacked.detach())
    with pytest.raises(ValueError, match="shorter|longer"):
        stacked.copy_(torch.zeros(11, 2, 3))


def test_checkpoints_keep_the_names_that_they_had(moe_folder):
    for layout in layouts_of(Trained(Policy.from_hf(moe_folder))):
        assert stored_key(layout.key) == layout.key
    assert stored_key("decoder.layers.0.mlp.experts.experts.linear_fc1.weight") == "decoder.layers.0.mlp.experts.fc1"
    assert stored_key("decoder.layers.0.mlp.experts.experts.linear_fc2.weight") == "decoder.layers.0.mlp.experts.fc2"
    assert (
        stored_key("decoder.layers.0.pre_mlp_layernorm.weight") == "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    )


@pytest.mark.parametrize("choice", ["auto", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", [False, True])
def test_it_is_not_looked_for_without_a_gpu(choice, dtype, experts):
    assert not wants_transformer_engine(choice, dtype, experts, gpu=False)


@pytest.mark.parametrize(("dtype", "experts"), [("float32", False), ("bfloat16", True), ("bfloat16", False)])
def test_auto_takes_it_for_bfloat16_without_experts_and_on_for_all(dtype, experts, monkeypatch):
    monkeypatch.setattr(_transformer_engine, "why_missing", lambda: None)
    takes = {
        choice: wants_transformer_engine(choice, getattr(torch, dtype), experts, gpu=True)
        for choice in ("auto", "on", "off")
    }
    assert takes == {"auto": dtype == "bfloat16" and not experts, "on": True, "off": False}


def test_what_a_model_is_made_of_follows_from_its_own_experts(dense_folder, moe_folder, monkeypatch):
    asked = []
    monkeypatch.setattr(_build, "wants_transformer_engine", lambda *given: bool(asked.append(given)))
    for folder in (dense_folder, moe_folder):
        Policy.from_hf(folder)
    gpu = torch.cuda.is_available()
    assert asked == [("auto", torch.float32, experts, gpu) for experts in (False, True)]


def test_a_wrong_value_is_refused():
    with pytest.raises(ValueError, match=r"transformer_engine: unknown .*'om'; valid: auto, off, on"):
        wants_transformer_engine("om", torch.bfloat16, experts=False, gpu=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_on_is_refused_without_a_gpu(dense_folder):
    with pytest.raises(ValueError, match=r'transformer_engine: "on" needs a GPU.*valid here: "auto", "off"'):
        Policy.from_hf(dense_folder, "bfloat16", transformer_engine="on")


@pytest.mark.skipif(why_missing() is None, reason="it is installed")
def test_on_names_what_is_missing():
    with pytest.raises(ValueError, match=r'transformer_engine: "on" needs the package transformer-engine\[pytorch\]'):
        wants_transformer_engine("on", torch.bfloat16, experts=False, gpu=True)


def test_auto_says_so_when_what_is_installed_does_not_load(monkeypatch):
    monkeypatch.setattr(_transformer_engine, "why_missing", lambda: "libcublas.so.13: cannot open shared object file")
    with pytest.warns(RuntimeWarning, match=r"transformer_engine: not used although installed: libcublas"):
        assert not wants_transformer_engine("auto", torch.bfloat16, experts=False, gpu=True)
    assert not wants_transformer_engine("auto", torch.bfloat16, experts=True, gpu=True)
    monkeypatch.setattr(_transformer_engine, "why_missing", lambda: "No module named 'transformer_engine'")
    assert not wants_transformer_engine("auto", torch.bfloat16, experts=False, gpu=True)


def test_runs_have_the_key(tmp_path):
    data = {"files": [tmp_path / "rows.jsonl"]}
    settings = {"model": tmp_path, "output": tmp_path, "steps": 1, "batch_size": 1, "data": data}
    assert SftSettings(**settings).transformer_engine == "auto"
    assert SftSettings(**settings, transformer_engine="on").transformer_engine == "on"
    with pytest.raises(ValueError, match="transformer_engine"):
        SftSettings(**settings, transformer_engine="yes")


def test_experts_are_stacked_where_the_grouped_product_takes_their_widths(monkeypatch):
    assert not keeps_experts(2048, 768, 1) and not keeps_experts(64, 48, 2)
    assert keeps_experts(64, 48, 4) and keeps_experts(64, 20, 1) and keeps_experts(60, 48, 1)
    monkeypatch.setattr(switches, "experts", False)
    assert keeps_experts(2048, 768, 1)
