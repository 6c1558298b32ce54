"""Weights to chunks in a store, and the manifest that describes them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vime_proto.checksum import checksum
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.validate import model_digest, validate_manifest
from vime_proto.weights.v1 import weights_pb2 as pb

from ._chunks import DTYPES, chunked, nbytes, raw_bytes
from ._store import ChunkStore

SOURCE = "rank-0"


def spool(
    update_id: str,
    version: common.PolicyVersion,
    tensors: Iterable[tuple[str, torch.Tensor]],
    chunk_bytes: int,
    store: ChunkStore,
) -> pb.WeightManifest:
    """Writes all chunks and returns the manifest. The tensors are copied: training may go on.

    Args:
        update_id: unique within the run, a plain file name.
        version: the version that an engine has afterwards.
        tensors: Hugging Face name and tensor, decoder layers in order.
        chunk_bytes: see `chunked`.
        store: where the chunks go; nothing of the update stays there when this raises.

    Raises:
        ContractError: a name twice, or no tensors.
        ValueError: an element type that cannot be sent, or a value that is not finite; names the tensor.
    """
    manifest = pb.WeightManifest(update_id=update_id, version=version)
    source = manifest.sources.add(source_id=SOURCE, total_bytes=0)
    try:
        for index, chunk in enumerate(chunked(tensors, chunk_bytes)):
            _add_chunk(manifest, source, index, chunk, store)
        manifest.model_digest = model_digest(manifest.tensors)
        validate_manifest(manifest)
    except BaseException:
        store.remove(update_id)
        raise
    return manifest


def _add_chunk(manifest: pb.WeightManifest, source: pb.WeightSource, index: int, chunk, store: ChunkStore) -> None:
    start = source.total_bytes
    parts = []
    for name, tensor in chunk:
        if tensor.is_floating_point() and tensor.element_size() > 1 and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"weight {name!r} holds a value that is not finite; it is not sent")
        length = nbytes(tensor)
        try:
            parts.append(raw_bytes(tensor))
        except ValueError as error:
            raise ValueError(f"weight {name!r}: {error}") from None
        spec = manifest.tensors.add(name=name, dtype=DTYPES[tensor.dtype], shape=tensor.shape)
        piece = spec.pieces.add(source_id=SOURCE)
        piece.bytes.offset, piece.bytes.length = source.total_bytes, length
        source.total_bytes += length
    entry = source.chunks.add(index=index, tensors=[name for name, _ in chunk])
    entry.bytes.offset, entry.bytes.length = start, source.total_bytes - start
    store.write(manifest.update_id, SOURCE, index, parts)
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    entry.checksum.CopyFrom(checksum(data))
