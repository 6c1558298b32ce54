"""Hugging Face model folders: reading weights lazily, writing a folder as one atomic unit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vime_trainer.files import new_directory
from vime_trainer.models._safetensors import TensorSpec, plan_files, write_files
from vime_trainer.models._sharding import Box

__all__ = ["WeightFiles", "write_folder"]

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_INDEX = "model.safetensors.index.json"


class WeightFiles:
    """The safetensors files of a folder; tensors are read from disk when asked for.

    With an index only what it lists counts: folders may hold the same weights in other files again.

    Raises:
        FileNotFoundError: the folder has no safetensors file, or not one that the index lists.
        ValueError: a damaged file, a tensor that the index lists and its file lacks, or one that two files hold.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self.folder / _INDEX
        listed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
        files = sorted({self.folder / file for file in listed.values()} or self.folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{self.folder}: no *.safetensors file")
        self._where: dict[str, Any] = {}
        for file in files:
            handle = _open(file)
            for name in handle.keys():
                if listed and listed.get(name) != file.name:
                    continue
                if name in self._where:
                    raise ValueError(
                        f"{self.folder}: tensor {name!r} is in two files, and no {_INDEX} says which counts"
                    )
                self._where[name] = handle
        if lost := sorted(listed.keys() - self._where.keys()):
            raise ValueError(f"{index}: lists {lost[0]!r} in {listed[lost[0]]}, which lacks it")

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._where)

    def check_shapes(self, specs: Mapping[str, tuple[int, ...]]) -> None:
        """Compares shapes without reading weights.

        Raises:
            ValueError: names the first tensor of another shape.
        """
        for name, shape in specs.items():
            found = tuple(self._where[name].get_slice(name).get_shape())
            if found != shape:
                raise ValueError(f"{self.folder}: tensor {name}: shape {found}; the model needs {shape}")

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """One tensor, or a box of it, on the CPU; no more than that is read from disk."""
        if box is None or not box:
            return self._where[name].get_tensor(name)
        part = self._where[name].get_slice(name)
        if any(one.start == one.stop for one in box):
            # safetensors knows no empty slices.
            return part[tuple(slice(0, 1) for _ in box)][tuple(slice(0, one.stop - one.start) for one in box)]
        return part[box]


def _open(file: Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file, though {_INDEX} lists it")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: not a safetensors file: {error}") from error


def write_folder(
    folder: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    specs: Mapping[str, TensorSpec],
    config: dict[str, Any],
    source: str | Path | None = None,
    max_shard_bytes: int = 4 << 30,
) -> Path:
    """Writes weights and config.json, and copies the tokenizer and other small files of `source`.

    The folder appears whole or not at all; one that exists is replaced.

    Args:
        folder: where to.
        tensors: names and tensors, streamed; one tensor at a time is held.
        specs: what `tensors` will bring, in its order.
        config: contents of config.json.
        source: folder whose files other than weights and config.json are copied.
        max_shard_bytes: most bytes of tensors in one file.

    Raises:
        ValueError: other tensors than `specs` says.
    """
    with new_directory(Path(folder)) as made:
        if source is not None:
            _copy_side_files(Path(source), made)
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _write_weights(made, tensors, specs, max_shard_bytes)
    return Path(folder)


def _copy_side_files(source: Path, made: Path) -> None:
    for file in sorted(source.iterdir()):
        known = file.name == "config.json" or file.name.endswith(_WEIGHT_SUFFIXES) or file.name.endswith(".index.json")
        if file.is_file() and not known:
            shutil.copyfile(file, made / file.name)


def _write_weights(
    made: Path, tensors: Iterable[tuple[str, Tensor]], specs: Mapping[str, TensorSpec], limit: int
) -> None:
    plan = plan_files(specs, limit)
    if len(plan) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{number + 1:05d}-of-{len(plan):05d}.safetensors" for number in range(len(plan))]
        content = {
            "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
            "weight_map": {name: file for file, part in zip(names, plan, strict=True) for name in part},
        }
        (made / _INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_files(((made / name, part) for name, part in zip(names, plan, strict=True)), tensors)
