"""A sender of weights, for tests and benchmarks: tensors to manifest, chunks and calls."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vime_proto.checksum import checksum
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.common.v1.common_pb2 import PolicyVersion
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.validate import model_digest
from vime_proto.weights.v1 import weights_pb2 as weights

TIMEOUT = 60


def manifest_of(
    tensors: Mapping[str, np.ndarray],
    version: PolicyVersion,
    chunks: int = 1,
    base: PolicyVersion | None = None,
    digest: str | None = None,
    sources: Sequence[str] = ("rank0",),
) -> tuple[weights.WeightManifest, dict[str, list[bytes]]]:
    """A manifest, and the chunks of each source: tensors are dealt to the sources in turn, and cut into equal chunks."""
    manifest = weights.WeightManifest(update_id=f"u-{uuid.uuid4().hex[:8]}", version=version, base_version=base)
    streams = {source: bytearray() for source in sources}
    for number, (name, array) in enumerate(tensors.items()):
        source = sources[number % len(sources)]
        data = np.ascontiguousarray(array, dtype=np.float32).tobytes()
        spec = manifest.tensors.add(name=name, dtype=common.DTYPE_FLOAT32, shape=array.shape)
        spec.pieces.add(source_id=source, bytes=common.ByteRange(offset=len(streams[source]), length=len(data)))
        streams[source] += data
    manifest.model_digest = digest or model_digest(manifest.tensors)
    parts: dict[str, list[bytes]] = {}
    for source, stream in streams.items():
        entry = manifest.sources.add(source_id=source, total_bytes=len(stream))
        step = -(-len(stream) // chunks // 4) * 4 if stream else 0
        parts[source] = [bytes(stream[low : low + step]) for low in range(0, len(stream), step)] if stream else []
        offset = 0
        for index, part in enumerate(parts[source]):
            entry.chunks.add(
                index=index, bytes=common.ByteRange(offset=offset, length=len(part)), checksum=checksum(part)
            )
            offset += len(part)
    return manifest, parts


def totals_of(manifest: weights.WeightManifest) -> list[weights.SourceTotal]:
    """What Commit states."""
    return [
        weights.SourceTotal(source_id=one.source_id, chunks=len(one.chunks), bytes=one.total_bytes)
        for one in manifest.sources
    ]


class Pusher:
    """Pushes weights into an engine by one transport."""

    def __init__(self, control, kind: str, root: Path | None = None):
        self.control = control
        self.kind = kind
        self.root = root
        self.transport_id = f"{kind}-{uuid.uuid4().hex[:6]}"
        config = weights.TransportConfig(transport_id=self.transport_id)
        if kind == "shm":
            config.shm.root = str(root)
        elif kind == "file":
            config.file.root_uri = f"file://{root}"
        else:
            config.stream.SetInParent()
        control.InitTransport(pb.InitTransportRequest(request_id=new_id(), config=config), timeout=TIMEOUT)

    def write(self, manifest, parts) -> None:
        """Lays the chunks where the engine finds them."""
        for source, chunks in parts.items():
            folder = self.root / manifest.update_id / source
            folder.mkdir(parents=True, exist_ok=True)
            for index, data in enumerate(chunks):
                (folder / f"{index}.bin").write_bytes(data)

    def begin(self, manifest, in_flight=pb.IN_FLIGHT_POLICY_UNSPECIFIED, **more):
        """BeginUpdate."""
        request = pb.BeginUpdateRequest(
            request_id=new_id(), manifest=manifest, transport_id=self.transport_id, in_flight=in_flight, **more
        )
        return self.control.BeginUpdate(request, timeout=TIMEOUT)

    def load(self, manifest, parts, source: str = "rank0", chunks: Sequence[int] | None = None, request_id: str = ""):
        """LoadChunks or SendChunks of a source."""
        wanted = range(len(parts[source])) if chunks is None else chunks
        if self.kind != "stream":
            request = pb.LoadChunksRequest(
                request_id=request_id or new_id(), update_id=manifest.update_id, source_id=source, chunks=wanted
            )
            return self.control.LoadChunks(request, timeout=TIMEOUT)
        return self.control.SendChunks(self._stream(manifest, parts, source, wanted), timeout=TIMEOUT)

    def _stream(self, manifest, parts, source, wanted, step: int = 1 << 20):
        for index in wanted:
            for offset in range(0, max(len(parts[source][index]), 1), step):
                yield pb.SendChunksRequest(
                    update_id=manifest.update_id, source_id=source, chunk=index, offset=offset,
                    data=parts[source][index][offset : offset + step],
                )  # fmt: skip

    def commit(self, manifest, **more):
        """CommitUpdate."""
        request = pb.CommitUpdateRequest(
            request_id=new_id(), update_id=manifest.update_id, totals=totals_of(manifest), **more
        )
        return self.control.CommitUpdate(request, timeout=TIMEOUT)

    def push(self, tensors, version: PolicyVersion, chunks: int = 1, in_flight=pb.IN_FLIGHT_POLICY_UNSPECIFIED, **more):
        """A whole update; the answer to Commit."""
        manifest, parts = manifest_of(tensors, version, chunks, **more)
        if self.kind != "stream":
            self.write(manifest, parts)
        self.begin(manifest, in_flight)
        for source in parts:
            if parts[source]:
                self.load(manifest, parts, source)
        return self.commit(manifest)


def new_id() -> str:
    """A fresh request id."""
    return uuid.uuid4().hex
