"""What is read from a model folder, and where tensors lie in chunks. No engine."""

import json

import models
import numpy as np
import pytest
from pushing import manifest_of

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.validate import model_digest
from vime_proto.version import policy_version
from vime_rollout.engine._model import describe, update_groups
from vime_rollout.engine._plan import check_finite, plan

VERSION = policy_version("run", 0, 1)


@pytest.fixture
def folder(tmp_path):
    cfg = models.config(moe=True)
    return models.save(tmp_path / "model", cfg, models.weights(cfg, 1))


def test_describes_experts_and_tensors(folder):
    model = describe(folder)
    assert (model.experts, model.top_k, model.moe_layer_ids) == (8, 2, (1,))
    assert model.expected["model.layers.1.mlp.experts.7.down_proj.weight"] == (common.DTYPE_FLOAT32, (64, 48))
    manifest, _ = manifest_of(models.weights(models.config(moe=True), 2), VERSION)
    assert model.digest == model_digest(manifest.tensors)


def test_weights_travel_in_the_engines_type_but_for_routing_biases(folder):
    cfg = models.config(moe=True)
    extra = {
        "model.layers.1.mlp.gate.e_score_correction_bias": np.zeros(8, np.float32),
        "model.layers.2.mlp.up_proj.weight": np.zeros((4, 4), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(16, np.float32),
    }
    models.save(folder, cfg, {**models.weights(cfg, 1), **extra})
    expected = describe(folder, "bfloat16").expected
    assert expected["model.layers.1.mlp.gate.e_score_correction_bias"][0] == common.DTYPE_FLOAT32
    assert expected["model.norm.weight"][0] == common.DTYPE_BFLOAT16
    # Behind the last layer, and computed ones: not loaded by the engine.
    assert not set(extra) - {"model.layers.1.mlp.gate.e_score_correction_bias"} & set(expected)


def test_a_tied_head_is_not_sent(tmp_path):
    cfg = models.config(tied=True)
    tensors = models.weights(cfg, 1)
    folder = models.save(tmp_path, cfg, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert "lm_head.weight" not in describe(folder).expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_local_experts": 8, "num_experts": None}, (1,)),
        ({"mlp_only_layers": []}, (0, 1)),
        ({"first_k_dense_replace": 1, "mlp_only_layers": []}, (1,)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": []}, (1,)),
        ({"num_experts": None}, ()),
    ],
)
def test_moe_layers_by_every_spelling(folder, change, expected):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    assert describe(folder).moe_layer_ids == expected


@pytest.mark.parametrize(("limit", "text"), [(257, "max_position_embeddings of 256")])
def test_limits_are_checked(folder, limit, text):
    with pytest.raises(ContractError, match=text):
        describe(folder, max_model_len=limit)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ContractError, match=r"config\.json"):
        describe(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(models.config()))
    with pytest.raises(ContractError, match="safetensors"):
        describe(tmp_path)


def test_tensors_of_a_fused_module_belong_together(folder):
    groups = update_groups(list(describe(folder).expected))
    layer = "model.layers.0.self_attn."
    assert groups[layer + "q_proj.weight"] == groups[layer + "v_proj.weight"] != groups[layer + "o_proj.weight"]
    experts = {groups[name] for name in groups if ".experts." in name}
    assert experts == {"model.layers.1.mlp.experts"}
    shared = update_groups(["m.mlp.shared_experts.gate_proj.weight", "m.mlp.experts.0.gate_proj.weight"])
    assert len(set(shared.values())) == 2


@pytest.mark.parametrize("chunks", [1, 3, 11])
def test_fills_cover_every_tensor_once(chunks):
    cfg = models.config(moe=True)
    tensors = models.weights(cfg, 1)
    manifest, parts = manifest_of(tensors, VERSION, chunks, sources=("a", "b"))
    found = {name: bytearray(array.nbytes) for name, array in tensors.items()}
    for source, sets in plan(manifest).items():
        assert len(sets) == len(parts[source])
        for data, fills in zip(parts[source], sets, strict=True):
            for fill in fills:
                assert fill.piece_bytes == tensors[fill.name].nbytes and fill.dtype == "float32"
                found[fill.name][fill.piece_offset : fill.piece_offset + fill.length] = data[
                    fill.offset : fill.offset + fill.length
                ]
    assert all(bytes(found[name]) == array.tobytes() for name, array in tensors.items())


def test_a_chunk_may_not_end_within_an_element():
    manifest, _ = manifest_of({"x": np.zeros(4, np.float32)}, VERSION)
    source = manifest.sources[0]
    del source.chunks[:]
    source.chunks.add(index=0, bytes=common.ByteRange(offset=0, length=6))
    source.chunks.add(index=1, bytes=common.ByteRange(offset=6, length=10))
    with pytest.raises(ContractError, match="within an element of 'x'"):
        plan(manifest)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_non_finite_weights_are_found_by_name(kind, bad):
    values = np.linspace(-3, 3, 64, dtype=np.float32)
    manifest, _ = manifest_of({"good": values, "bad": values}, VERSION)
    dtype = {"float32": common.DTYPE_FLOAT32, "float16": common.DTYPE_FLOAT16, "bfloat16": common.DTYPE_BFLOAT16}[kind]
    fills = plan(manifest)["rank0"][0]
    dtypes = dict.fromkeys(("good", "bad"), dtype)

    def encoded(array):
        if kind == "bfloat16":
            return (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return array.astype(kind).tobytes()

    size = len(encoded(values))
    fills = [one._replace(offset=number * size, length=size) for number, one in enumerate(fills)]
    check_finite(memoryview(encoded(values) * 2), fills, dtypes)
    spoiled = values.copy()
    spoiled[9] = bad
    with pytest.raises(ValueError, match="'bad' holds NaN or infinite"):
        check_finite(memoryview(encoded(values) + encoded(spoiled)), fills, dtypes)
