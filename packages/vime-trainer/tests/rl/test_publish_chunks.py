"""Weights to chunks, the bytes of a version, and who still needs them; no engine takes part."""

import asyncio
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.validate import validate_manifest
from vime_proto.version import policy_version
from vime_trainer import publish
from vime_trainer.publish import DirectoryStore, MemoryStore, Quorum, Retention, WeightsSettings, chunked, spool


def test_public_names():
    assert sorted(publish.__all__) == [
        "ChunkStore",
        "DirectoryStore",
        "Fleet",
        "MemoryStore",
        "PublishError",
        "PublishReport",
        "Publisher",
        "Quorum",
        "Retention",
        "WeightsSettings",
        "chunked",
        "spool",
    ]


def moe(layers: int, experts: int, size: int = 4):
    yield "model.embed_tokens.weight", torch.zeros(size)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", torch.zeros(size)
        for expert in range(experts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield f"{prefix}.mlp.experts.{expert}.{name}.weight", torch.zeros(size)
        yield f"{prefix}.input_layernorm.weight", torch.zeros(size)
    yield "lm_head.weight", torch.zeros(size)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 1200))
def test_experts_of_a_layer_are_never_separated(layers, experts, chunk_bytes):
    chunks = list(chunked(moe(layers, experts), chunk_bytes))
    names = [name for chunk in chunks for name, _ in chunk]
    assert sorted(names) == sorted(name for name, _ in moe(layers, experts))
    for layer in range(layers):
        holding = [
            i for i, chunk in enumerate(chunks) if any(f"layers.{layer}.mlp.experts" in name for name, _ in chunk)
        ]
        assert len(holding) == 1
    for chunk in chunks:
        size = sum(4 * tensor.numel() for _, tensor in chunk)
        only_experts = all(".experts." in name for name, _ in chunk)
        assert size <= chunk_bytes or len(chunk) == 1 or only_experts


def test_a_layer_that_fits_stays_whole():
    chunks = list(chunked(moe(2, 2), 8 * 16))
    assert [chunk[0][0] for chunk in chunks] == [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "lm_head.weight",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_bytes_and_dtype_of_a_tensor_travel_as_they_are(dtype):
    store = MemoryStore()
    tensor = torch.arange(6).reshape(2, 3).to(dtype).T
    manifest = spool("u", policy_version("run", 0, 1), [("w", tensor), ("s", torch.tensor(1.0))], 1000, store)
    validate_manifest(manifest)
    data = b"".join(part for _, part in store.read("u", "rank-0", 0, 5))
    length = 6 * tensor.element_size()
    back = torch.frombuffer(bytearray(data[:length]), dtype=dtype).reshape(3, 2)
    assert torch.equal(back, tensor)
    assert list(manifest.tensors[0].shape) == [3, 2] and list(manifest.tensors[1].shape) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_not_sent(bad, tmp_path):
    store = DirectoryStore(tmp_path / "root")
    tensors = [("a", torch.zeros(4)), ("b.weight", torch.tensor([0.0, bad]))]
    with pytest.raises(ValueError, match=r"'b\.weight' holds a value that is not finite"):
        spool("u", policy_version("run", 0, 1), tensors, 8, store)
    assert not (tmp_path / "root" / "u").exists()


def test_a_name_twice_or_an_odd_type_is_refused():
    version = policy_version("run", 0, 1)
    with pytest.raises(ValueError, match="'a' is repeated"):
        spool("u", version, [("a", torch.zeros(1)), ("a", torch.zeros(1))], 100, MemoryStore())
    with pytest.raises(ValueError, match=r"weight 'c': element type torch\.complex64"):
        spool("u", version, [("c", torch.zeros(1, dtype=torch.complex64))], 100, MemoryStore())


def test_retention_keeps_what_somebody_needs():
    kept = Retention()
    for name, engines in (("one", ["a", "b"]), ("two", ["a"]), ("three", [])):
        kept.add(name)
        kept.sent(name, engines)
        kept.published(name)
        if name == "one":
            kept.done("one", "a")
    assert kept.take_removable() == []  # one: b; two: a; three: the newest
    kept.done("two", "a")
    kept.opened("two")
    assert kept.take_removable() == []
    kept.closed("two")
    assert kept.take_removable() == ["two"]
    kept.done("one", "b")
    kept.done("one", "b")
    assert kept.take_removable() == ["one"]
    assert kept.take_removable() == [] and kept.newest == "three"
    # A version on its way out stays, although its first attempt failed with the only engine and a late one reads the newest.
    kept.add("four")
    kept.sent("four", ["a"])
    kept.done("four", "a")
    assert kept.take_removable() == []
    kept.published("four")
    assert kept.take_removable() == ["three"]


@pytest.mark.parametrize(("need", "events", "expected"), [
    (2, "rr", True), (2, "rf", False), (1, "fr", True), (1, "ff", False), (0, "", True), (3, "", False),
])  # fmt: skip
async def test_quorum(need, events, expected):
    quorum = Quorum(need, 2)
    waiting = []
    for event in events:
        if event == "r":
            waiting.append(asyncio.create_task(quorum.ready()))
        else:
            quorum.failed()
        await asyncio.sleep(0)
    assert [await one for one in waiting] == [expected] * len(waiting)
    assert quorum._decision.result() is expected


def test_settings_are_checked(tmp_path):
    with pytest.raises(ValueError, match="root: needed by transport file"):
        WeightsSettings(transport="file")
    with pytest.raises(ValueError, match="must be an absolute path"):
        WeightsSettings(root="weights")
    assert common.DTYPE_BFLOAT16 == publish._chunks.DTYPES[torch.bfloat16]
