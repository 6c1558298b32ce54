"""Folders are written and read tensor by tensor: what is held at once, what the files say, what a broken stream leaves."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vime_trainer import models
from vime_trainer.models import TensorSpec, write_folder
from vime_trainer.policy import Policy


class Live:
    """Bytes of those tensors that are still held by someone."""

    def __init__(self) -> None:
        self.now = self.peak = self.total = 0

    def watch(self, tensor):
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self.now += size
        self.total += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, size)
        return tensor

    def _gone(self, size: int) -> None:
        self.now -= size


def test_one_tensor_is_held_while_writing(tmp_path):
    specs = {f"t{number}": TensorSpec(torch.float32, (50, 100)) for number in range(40)}
    live = Live()

    def stream():
        for number, name in enumerate(specs):
            yield name, live.watch(torch.full((50, 100), float(number)))

    write_folder(tmp_path / "out", stream(), specs, {}, max_shard_bytes=100_000)
    assert live.total == 40 * 20_000 and live.peak <= 2 * 20_000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == live.total and len(set(index["weight_map"].values())) == 8
    for name, file in index["weight_map"].items():
        assert (load_file(tmp_path / "out" / file)[name] == int(name[1:])).all()


def test_a_model_is_never_held_twice(glm_folder, tmp_path, monkeypatch):
    """Reading and writing hold one Megatron parameter and its Hugging Face tensors beside the model."""
    live = Live()
    read = models.WeightFiles.read
    monkeypatch.setattr(models.WeightFiles, "read", lambda self, *given: live.watch(read(self, *given)))
    policy = Policy.from_hf(glm_folder)
    whole = sum(value.nbytes for value in policy.weights().values())
    largest = max(value.nbytes for value in policy.weights().values())
    assert live.total == whole and live.peak <= largest < whole / 5

    live = Live()
    tensors = policy.hf_tensors
    monkeypatch.setattr(policy, "hf_tensors", lambda: watched(live, policy, tensors()))
    policy.save_hf(tmp_path / "out", max_shard_bytes=1 << 30)
    assert live.peak <= largest


def watched(live, policy, tensors):
    own = {value.untyped_storage().data_ptr() for value in policy.weights().values()}
    for name, tensor in tensors:
        yield name, tensor if tensor.untyped_storage().data_ptr() in own else live.watch(tensor)


def test_wider_types_come_first_so_that_every_tensor_is_aligned(tmp_path):
    specs = {
        "odd": TensorSpec(torch.bfloat16, (3,)),
        "wide": TensorSpec(torch.float32, (2, 2)),
        "half": TensorSpec(torch.float16, (1,)),
    }
    tensors = [
        (name, torch.arange(spec.shape[0]).to(spec.dtype).expand(spec.shape[::-1]).t()) for name, spec in specs.items()
    ]
    write_folder(tmp_path / "out", tensors, specs, {})
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name, tensor in tensors:
            assert file.get_tensor(name).dtype == tensor.dtype and torch.equal(file.get_tensor(name), tensor)
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0 and len(data) == 8 + length + 24
    assert header["wide"]["data_offsets"] == [0, 16] and header["odd"]["data_offsets"] == [16, 22]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [("a", torch.ones(2)), ("c", torch.ones(2))],
            "tensor 'b': torch.float32 .* was planned, the model brings 'c'",
        ),
        ([("a", torch.ones(2).bfloat16())], "tensor 'a': .* brings 'a': torch.bfloat16"),
        ([("a", torch.ones(2))], "tensor 'b': .* brings nothing"),
        ([(name, torch.ones(2)) for name in "abc"], "tensor 'c' was not planned"),
    ],
)
def test_another_stream_than_planned_leaves_no_folder(tmp_path, given, message):
    specs = {name: TensorSpec(torch.float32, (2,)) for name in "ab"}
    with pytest.raises(ValueError, match=message):
        write_folder(tmp_path / "out", given, specs, {})
    assert list(tmp_path.iterdir()) == []


def test_an_index_says_which_files_count(tmp_path):
    specs = {name: TensorSpec(torch.float32, (2,)) for name in "ab"}
    folder = write_folder(tmp_path / "m", [(name, torch.ones(2)) for name in "ab"], specs, {}, max_shard_bytes=8)
    save_file({"a": torch.zeros(2), "other": torch.zeros(1)}, folder / "consolidated.safetensors")
    files = models.WeightFiles(folder)
    assert files.names == {"a", "b"} and files.read("a").tolist() == [1, 1]
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors: no such file, though"):
        models.WeightFiles(folder)
    save_file({"c": torch.zeros(2)}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"lists 'b' in model-00002-of-00002\.safetensors, which lacks it"):
        models.WeightFiles(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="tensor 'a' is in two files"):
        models.WeightFiles(folder)
    (folder / "consolidated.safetensors").write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"consolidated\.safetensors: not a safetensors file"):
        models.WeightFiles(folder)
