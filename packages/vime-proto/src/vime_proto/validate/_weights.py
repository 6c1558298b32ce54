"""Weight manifests and transports."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import PurePosixPath

from vime_proto.channel import split_address
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.tensor import itemsize
from vime_proto.validate import _fields as fields
from vime_proto.validate._pieces import Box, covered_once
from vime_proto.weights.v1 import weights_pb2 as pb


def dtype_name(dtype: int) -> str:
    """Name of a Dtype as model_digest spells it, such as "bfloat16"."""
    return common.Dtype.Name(dtype).removeprefix("DTYPE_").lower()


def model_digest(tensors: Iterable[pb.TensorSpec]) -> str:
    """SHA-256 over the sorted lines "name dtype shape", such as "lm_head.weight float32 32,64", each ended by a line feed.

    Equal for equal architectures. The shape is the whole tensor's, comma-separated; a scalar's is empty.
    """
    lines = sorted(f"{spec.name} {dtype_name(spec.dtype)} {','.join(map(str, spec.shape))}\n" for spec in tensors)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def validate_manifest(manifest: pb.WeightManifest, field: str = "manifest") -> None:
    """Checks a manifest: names once, pieces that cover each tensor once, chunks contiguous, every byte of a source accounted for.

    For a full update (no base_version) the digest must be that of its tensors.

    Raises:
        ContractError: names the field, the tensor and the source.
    """
    _path_part(manifest.update_id, f"{field}.update_id")
    fields.version(manifest, "version", f"{field}.version")
    if manifest.HasField("base_version"):
        fields.version(manifest, "base_version", f"{field}.base_version")
    if not manifest.sources:
        raise ContractError(f"{field}.sources", "must not be empty")
    fields.unique((source.source_id for source in manifest.sources), field + ".sources[{}].source_id")
    totals = {source.source_id: _source(source, f"{field}.sources[{i}]") for i, source in enumerate(manifest.sources)}
    if not manifest.tensors and not manifest.HasField("base_version"):
        raise ContractError(f"{field}.tensors", "must not be empty in a full update")
    fields.unique((spec.name for spec in manifest.tensors), field + ".tensors[{}].name")
    used: dict[str, list[tuple[int, int]]] = {source_id: [] for source_id in totals}
    for index, spec in enumerate(manifest.tensors):
        _tensor(spec, totals, used, f"{field}.tensors[{index}]")
    for source_id, ranges in used.items():
        _contiguous(sorted(ranges), totals[source_id], f"{field}.tensors.pieces.bytes", f"source {source_id!r}")
    _complete_tensors(manifest, field)
    fields.text(manifest.model_digest, f"{field}.model_digest")
    if not manifest.HasField("base_version") and manifest.model_digest != model_digest(manifest.tensors):
        raise ContractError(
            f"{field}.model_digest",
            f"is {manifest.model_digest}, that of the tensors is {model_digest(manifest.tensors)}",
        )


def _path_part(value: str, field: str) -> None:
    """Ids become names of folders: one plain part, so that none leads out of the root."""
    fields.text(value, field)
    if value in (".", "..") or "/" in value or "\\" in value or "\0" in value:
        raise ContractError(field, f"must be a plain name without slashes, got {value!r}")


def _source(source: pb.WeightSource, field: str) -> int:
    _path_part(source.source_id, f"{field}.source_id")
    about = f" (source {source.source_id!r})"
    if source.endpoint:
        split_address(source.endpoint)
    end = 0
    for index, chunk in enumerate(source.chunks):
        name = f"{field}.chunks[{index}]"
        if fields.present(chunk, "index", f"{name}.") != index:
            raise ContractError(f"{name}.index", f"must be {index}, got {chunk.index}{about}")
        start, stop = fields.byte_range(chunk.bytes, f"{name}.bytes")
        if start != end:
            raise ContractError(
                f"{name}.bytes.offset", f"chunks must be contiguous: expected {end}, got {start}{about}"
            )
        end = stop
    if fields.present(source, "total_bytes", f"{field}.") != end:
        raise ContractError(f"{field}.total_bytes", f"chunks hold {end} bytes, stated are {source.total_bytes}{about}")
    return end


def _tensor(spec: pb.TensorSpec, totals: dict[str, int], used: dict[str, list[tuple[int, int]]], field: str) -> None:
    about = f" (tensor {spec.name!r})"
    size = itemsize(spec.dtype, f"{field}.dtype")
    shape = tuple(spec.shape)
    if not spec.pieces:
        raise ContractError(f"{field}.pieces", f"must not be empty{about}")
    boxes: list[Box] = []
    for index, piece in enumerate(spec.pieces):
        name = f"{field}.pieces[{index}]"
        if piece.source_id not in totals:
            raise ContractError(f"{name}.source_id", f"unknown {piece.source_id!r}; valid: {', '.join(totals)}{about}")
        start, stop = fields.byte_range(piece.bytes, f"{name}.bytes", totals[piece.source_id])
        used[piece.source_id].append((start, stop))
        if len(piece.start) not in (0, len(shape)) or len(piece.shape) != len(piece.start):
            raise ContractError(
                f"{name}.start", f"start and shape must both be empty or have {len(shape)} entries{about}"
            )
        first = tuple(piece.start) or (0,) * len(shape)
        extent = tuple(piece.shape) or shape
        if any(low + count > limit for low, count, limit in zip(first, extent, shape, strict=True)):
            raise ContractError(
                f"{name}.shape", f"{list(first)} + {list(extent)} leaves the shape {list(shape)}{about}"
            )
        if math.prod(extent) * size != stop - start:
            raise ContractError(
                f"{name}.bytes.length",
                f"shape {list(extent)} needs {math.prod(extent) * size} bytes, got {stop - start}{about}",
            )
        boxes.append((first, extent))
    if not covered_once(boxes, shape):
        raise ContractError(f"{field}.pieces", f"do not cover the shape {list(shape)} exactly once{about}")


def _contiguous(ranges: list[tuple[int, int]], total: int, field: str, what: str) -> None:
    end = 0
    for start, stop in ranges:
        if start != end:
            owners = "two pieces" if start < end else "no piece"
            raise ContractError(field, f"{what}: bytes [{min(start, end)}, {max(start, end)}) belong to {owners}")
        end = stop
    if end != total:
        raise ContractError(field, f"{what}: bytes [{end}, {total}) belong to no piece")


def _complete_tensors(manifest: pb.WeightManifest, field: str) -> None:
    names = {spec.name for spec in manifest.tensors}
    for s, source in enumerate(manifest.sources):
        for c, chunk in enumerate(source.chunks):
            for name in chunk.tensors:
                if name not in names:
                    raise ContractError(f"{field}.sources[{s}].chunks[{c}].tensors", f"unknown tensor {name!r}")


def validate_transport(
    config: pb.TransportConfig, available: Iterable[str] | None = None, field: str = "config"
) -> str:
    """Checks a transport and returns its kind: "file", "shm", "stream", "nccl" or "cuda_ipc".

    Args:
        config: the message.
        available: kinds that the receiver can use; None skips that.
        field: how errors name it.

    Raises:
        ContractError: names the field and the valid values.
    """
    fields.text(config.transport_id, f"{field}.transport_id")
    kind = config.WhichOneof("transport")
    valid = list(available) if available is not None else ["file", "shm", "stream", "nccl", "cuda_ipc"]
    if kind not in valid:
        raise ContractError(
            f"{field}.transport", f"{kind or 'nothing'} is not available here; valid: {', '.join(valid)}"
        )
    if kind == "file":
        fields.text(config.file.root_uri, f"{field}.file.root_uri")
    elif kind == "shm":
        if not PurePosixPath(config.shm.root).is_absolute():
            raise ContractError(f"{field}.shm.root", f"must be an absolute path, got {config.shm.root!r}")
    elif kind == "nccl":
        split_address(config.nccl.store_address)
        fields.at_least(config.nccl.world_size, 2, f"{field}.nccl.world_size")
        fields.text(config.nccl.group_id, f"{field}.nccl.group_id")
        if not config.nccl.timeout_seconds > 0:
            raise ContractError(f"{field}.nccl.timeout_seconds", "must be above 0")
        for engine, rank in config.nccl.rank_offsets.items():
            if not 0 < rank < config.nccl.world_size:
                name = f"{field}.nccl.rank_offsets[{engine!r}]"
                raise ContractError(name, f"must be in (0, {config.nccl.world_size}), got {rank}")
    elif kind == "cuda_ipc":
        for source, handle in config.cuda_ipc.handles.items():
            name = f"{field}.cuda_ipc.handles[{source!r}]"
            fields.text(handle.gpu_uuid, f"{name}.gpu_uuid")
            for key in ("memory_handle", "event_handle"):
                if len(getattr(handle, key)) != 64:
                    raise ContractError(f"{name}.{key}", f"must be 64 bytes, got {len(getattr(handle, key))}")
    return kind
