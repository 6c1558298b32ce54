"""Weights for the engine under test: from --manifest-dir, or made up for the fake."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.fakes import build
from vime_proto.fakes._toy_model import toy_weights
from vime_proto.fakes._weight_files import read_chunk
from vime_proto.tensor import numpy_dtype
from vime_proto.weights.v1 import weights_pb2

Tensors = dict[str, tuple[np.ndarray, int]]


def read_manifest_dir(path: str) -> Tensors:
    """Tensors of `manifest.pb` and its chunks `<source_id>/<index>.bin`; each tensor in one piece."""
    root = Path(path)
    manifest = weights_pb2.WeightManifest.FromString((root / "manifest.pb").read_bytes())
    streams = {
        source.source_id: b"".join(read_chunk(root, ".", source.source_id, chunk.index) for chunk in source.chunks)
        for source in manifest.sources
    }
    tensors: Tensors = {}
    for spec in manifest.tensors:
        (piece,) = spec.pieces
        data = streams[piece.source_id][piece.bytes.offset : piece.bytes.offset + piece.bytes.length]
        tensors[spec.name] = (np.frombuffer(data, numpy_dtype(spec.dtype)).reshape(tuple(spec.shape)), spec.dtype)
    return tensors


def weights_of(architecture: str, manifest_dir: str | None) -> Tensors | None:
    """Weights that fit the engine; None when there are none to be had."""
    if manifest_dir:
        return read_manifest_dir(manifest_dir)
    return toy_weights(1) if architecture == "ToyForCausalLM" else None


def layers(names: Sequence[str]) -> list[list[str]]:
    """Names grouped by layer: an engine may need all experts of a layer together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        found = re.search(r"layers\.\d+\.", name)
        groups.setdefault(found.group() if found else "", []).append(name)
    return list(groups.values())


class Update:
    """One update that is about to be sent: its manifest, and the bytes of each chunk by source."""

    def __init__(
        self,
        update_id: str,
        version: common.PolicyVersion,
        tensors: Tensors,
        sources: int = 1,
        several: bool = False,
        base: common.PolicyVersion | None = None,
        checksums: bool = True,
    ):
        groups = layers(list(tensors))
        plan = {
            f"rank-{i}": groups[i::sources] if several else [[n for group in groups[i::sources] for n in group]]
            for i in range(sources)
        }
        plan = {source: [names for names in chunks if names] for source, chunks in plan.items()}
        self.manifest, self.streams = build.manifest(update_id, version, tensors, plan, base, checksums)

    @property
    def update_id(self) -> str:
        return self.manifest.update_id

    @property
    def totals(self) -> list[weights_pb2.SourceTotal]:
        return build.totals(self.streams)

    @property
    def size(self) -> int:
        return sum(len(chunk) for chunks in self.streams.values() for chunk in chunks)
