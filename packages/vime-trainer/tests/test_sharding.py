"""Parts of weights over tensor, expert and expert-tensor ranks: joined they are the whole, bit by bit."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vime_trainer import models
from vime_trainer.models import Architecture, Place, boxes, join, shard, unshard

SIZES = (1, 2, 4)


def architecture(vocab: int = 10, tied: bool = False, **more) -> Architecture:
    sizes = {
        "layers": 2, "hidden": 6, "vocab": vocab, "heads": 8, "kv_heads": 4, "head_dim": 3, "ffn": 12, "tied": tied,
        "norm_eps": 1e-6, "rope_theta": 1e4, "max_positions": 64, "init_std": 0.1, "qkv_bias": True, "experts": 8,
        "top_k": 2, "expert_ffn": 4, "moe_layers": frozenset({1}),
    }  # fmt: skip
    return Architecture(**(sizes | more))


def places(tensor: int, expert: int = 1, expert_tensor: int = 1) -> list[Place]:
    """All places, in the order that `join` wants for routed experts when tensor is 1."""
    ranks = product(range(tensor), range(expert), range(expert_tensor))
    return [Place(t, tensor, e, expert, et, expert_tensor) for t, e, et in ranks]


def holders(entry, tensor, expert, expert_tensor):
    """One place for each part of an entry, in order."""
    if entry.experts:
        of_expert = places(1, expert, expert_tensor if entry.cut != "none" else 1)
        return [dataclasses.replace(p, expert_tensor_size=expert_tensor) for p in of_expert]
    return places(tensor) if entry.cut != "none" else [Place()]


def whole_of(entry, arch, seed):
    """A whole Megatron parameter with bits of every kind, NaN payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    parts = [
        torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int32).view(torch.float32)
        for shape in entry.shapes
    ]
    return entry.rule.merge(parts, arch)


def same_bits(one, two):
    return one.shape == two.shape and torch.equal(
        one.contiguous().view(torch.int32), two.contiguous().view(torch.int32)
    )


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(models.FAMILIES),
    st.sampled_from(SIZES),
    st.sampled_from(SIZES),
    st.sampled_from((1, 2)),
    st.integers(4, 17),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_parts_join_to_the_whole_bit_by_bit(family, tensor, expert, expert_tensor, vocab, tied, seed):
    arch = architecture(vocab, tied)
    entries = models.expand(family.weights, arch)
    assert any(entry.megatron == "output_layer.weight" for entry in entries) is not tied
    for entry in entries:
        whole = whole_of(entry, arch, seed)
        holding = holders(entry, tensor, expert, expert_tensor)
        shards = [shard(entry, whole, arch, place) for place in holding]
        sizes = Place(0, tensor, 0, expert, 0, expert_tensor)
        assert {tuple(one.shape) for one in shards} == {models.local_shape(entry, arch, sizes)}
        assert same_bits(unshard(entry, shards, arch, sizes), whole)
        tensors = join(entry, shards, arch, sizes)
        assert [tuple(one.shape) for one in tensors] == list(entry.shapes)
        assert all(same_bits(a, b) for a, b in zip(tensors, entry.rule.split(whole, arch), strict=True))
        if len(holding) > 1:
            assert sum(one.numel() for one in shards) >= whole.numel() > shards[0].numel()


def test_parts_are_what_megatrons_layers_compute_with():
    """By hand: head groups in one piece, gate and up halves each cut, inputs of a row-parallel weight."""
    arch = architecture(heads=4, kv_heads=2, head_dim=1, hidden=2, ffn=4, expert_ffn=2)
    named = {entry.megatron: entry for entry in models.expand(models.FAMILIES[1].weights, arch)}
    second = Place(1, 2, 1, 4, 1, 2)
    qkv = torch.arange(8.0)
    bias = named["decoder.layers.0.self_attention.linear_qkv.bias"]
    assert shard(bias, qkv, arch, second).tolist() == [4, 5, 6, 7]
    fc1 = torch.arange(8.0)[:, None].expand(8, 2)
    gate_up = named["decoder.layers.0.mlp.linear_fc1.weight"]
    assert shard(gate_up, fc1, arch, second)[:, 0].tolist() == [2, 3, 6, 7]
    down = torch.arange(4.0).expand(2, 4)
    assert shard(named["decoder.layers.0.mlp.linear_fc2.weight"], down, arch, second)[0].tolist() == [2, 3]
    experts = (10 * torch.arange(8.0)[:, None] + torch.arange(4.0))[..., None].expand(8, 4, 2)
    fc1 = shard(named["decoder.layers.1.mlp.experts.fc1"], experts, arch, second)
    assert fc1[..., 0].tolist() == [[21, 23], [31, 33]]
    table = torch.arange(10.0)[:, None].expand(10, 2)
    last = shard(named["output_layer.weight"], table, arch, Place(3, 4))
    assert last[:, 0].tolist() == [9, 0, 0]  # 3 rows a rank, the last two are padding


def test_only_the_ranks_part_is_read_from_disk(tmp_path, monkeypatch):
    arch = architecture(vocab=5)
    entries = models.expand(models.FAMILIES[1].weights, arch)
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in models.specs(entries).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    files = models.WeightFiles(tmp_path)
    files.check_shapes(models.specs(entries))
    place = Place(3, 4, 1, 2, 1, 2)  # the vocabulary's last rank holds padding alone
    read = []

    def reading(name, box):
        part = files.read(name, box)
        read.append(part.numel())
        return part

    params = {entry.megatron: torch.full(models.local_shape(entry, arch, place), -1.0) for entry in entries}
    models.fill(entries, params, arch, reading, place)
    for entry in entries:
        whole = entry.rule.merge([tensors[name] for name in entry.hf], arch)
        assert torch.equal(params[entry.megatron], shard(entry, whole, arch, place)), entry.megatron
    kept = sum(param.numel() for param in params.values())
    assert sum(read) == kept - 2 * 2 * arch.hidden
    assert len(boxes(entries[-1], place)) == 4


@pytest.mark.parametrize(
    ("change", "place", "message"),
    [
        ({"kv_heads": 2}, Place(0, 4), "parallel.tensor: 4 does not divide the model's num_key_value_heads of 2"),
        ({"ffn": 6}, Place(0, 4), "parallel.tensor: 4 does not divide the model's intermediate_size of 6"),
        ({}, Place(0, 1, 0, 3), "parallel.expert: 3 does not divide the model's number of experts of 8"),
        (
            {},
            Place(0, 1, 0, 1, 0, 3),
            "parallel.expert_tensor: 3 does not divide the model's moe_intermediate_size of 4",
        ),
        ({"moe_layers": frozenset()}, Place(0, 1, 0, 2), "parallel.expert: 2, but the model has no experts; valid: 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(change, place, message):
    with pytest.raises(ValueError) as error:
        models.check_place(architecture(**change), place)
    assert str(error.value) == message
    models.check_place(architecture(), Place(0, 4, 0, 4, 0, 2))


def test_a_wrong_number_of_parts_and_a_wrong_rank_are_refused():
    arch = architecture()
    entry = models.expand(models.FAMILIES[0].weights, arch)[0]
    with pytest.raises(ValueError, match=r"word_embeddings\.weight: 1 parts; valid: 2"):
        unshard(entry, [torch.zeros(5, 6)], arch, Place(0, 2))
    with pytest.raises(ValueError, match="tensor_rank: 2; valid: 0 to 1"):
        Place(2, 2)
