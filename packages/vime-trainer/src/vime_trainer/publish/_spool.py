"""Weights to chunks in a store, and the manifest that describes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from vime_proto.checksum import checksum
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.validate import model_digest, validate_manifest
from vime_proto.weights.v1 import weights_pb2 as pb

from ._chunks import DTYPES, Named, chunked, host_bytes, nbytes
from ._store import ChunkStore

SOURCE = "rank-0"
# Chunks that are hashed and written while the next ones come from the device; so many more lie in host memory.
_WRITERS = 3


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

    def write(index: int, data: memoryview) -> common.Checksum:
        # Both leave the interpreter to other threads.
        store.write(update_id, SOURCE, index, [data])
        return checksum(data)

    try:
        writing: deque[tuple[pb.WeightChunk, Future[common.Checksum]]] = deque()
        # Leaving the block waits for every writer, also when one has failed.
        with ThreadPoolExecutor(_WRITERS, "vime-spool") as writers:
            for index, chunk in enumerate(chunked(tensors, chunk_bytes)):
                data = _host_bytes(chunk)
                entry = _add_chunk(manifest, source, index, chunk)
                writing.append((entry, writers.submit(write, index, data)))
                del data
                if len(writing) > _WRITERS:
                    _finish(*writing.popleft())
            while writing:
                _finish(*writing.popleft())
        manifest.model_digest = model_digest(manifest.tensors)
        validate_manifest(manifest)
    except BaseException:
        store.remove(update_id)
        raise
    return manifest


def _finish(entry: pb.WeightChunk, written: Future[common.Checksum]) -> None:
    entry.checksum.CopyFrom(written.result())


def _host_bytes(chunk: list[Named]) -> memoryview:
    # Asked for before the bytes move, looked at after: a GPU is waited for once.
    floats = [(name, tensor) for name, tensor in chunk if tensor.is_floating_point() and tensor.element_size() > 1]
    finite = [torch.isfinite(tensor).all() for _, tensor in floats]
    data = host_bytes(chunk)
    for (name, _), all_are in zip(floats, finite, strict=True):
        if not bool(all_are):
            raise ValueError(f"weight {name!r} holds a value that is not finite; it is not sent")
    return data


def _add_chunk(manifest: pb.WeightManifest, source: pb.WeightSource, index: int, chunk: list[Named]) -> pb.WeightChunk:
    start = source.total_bytes
    for name, tensor in chunk:
        length = nbytes(tensor)
        spec = manifest.tensors.add(name=name, dtype=DTYPES[tensor.dtype], shape=tensor.shape)
        piece = spec.pieces.add(source_id=SOURCE)
        piece.bytes.offset, piece.bytes.length = source.total_bytes, length
        source.total_bytes += length
    entry = source.chunks.add(index=index, tensors=[name for name, _ in chunk])
    entry.bytes.offset, entry.bytes.length = start, source.total_bytes - start
    return entry
