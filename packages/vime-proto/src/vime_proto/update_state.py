"""The receiver's bookkeeping of one weight update, without I/O: what is expected, what came, and whether it may commit.

    update = UpdateReceiver(manifest, expected=..., held=machine.version)  # refuses before a byte is loaded
    chunks = update.check_load(source_id, [0, 1])                          # caller's mistakes; the update stays open
    update.check_chunk(source_id, 0, data)                                 # DATA_LOSS: the update must fail
    update.chunk_loaded(source_id, 0)
    update.check_totals(totals); update.complete; update.check_checksums(totals)

Two kinds of errors: ContractError and FAILED_PRECONDITION are the caller's mistakes and leave the update as it was; DATA_LOSS says
that the bytes are wrong, and the engine must then fail the update (`EngineMachine.fail_update`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import grpc
import xxhash

from vime_proto.checksum import checksum
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError, StatusError
from vime_proto.validate import dtype_name, model_digest, validate_manifest
from vime_proto.version import show
from vime_proto.weights.v1 import weights_pb2 as pb

_HASHERS = {common.CHECKSUM_ALGORITHM_XXH3_64: xxhash.xxh3_64, common.CHECKSUM_ALGORITHM_SHA256: hashlib.sha256}

Expected = Mapping[str, tuple[int, tuple[int, ...]]]
"""What a model takes: Dtype and whole shape by tensor name."""


def expected_of(tensors: Iterable[pb.TensorSpec]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The `Expected` that a list of tensors describes."""
    return {spec.name: (spec.dtype, tuple(spec.shape)) for spec in tensors}


def digest_of(expected: Expected) -> str:
    """The model digest of what a model takes."""
    return model_digest(pb.TensorSpec(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in expected.items())


class UpdateReceiver:
    """One update between Begin and Commit.

    Args:
        manifest: what the sender announces.
        expected: what the model takes. A full update must hold exactly these tensors, a delta some of them.
        held: the version that the engine holds; a delta must name it as its base.
        digest: the model digest that the manifest must state; None takes that of `expected`.
        deadline_seconds: seconds until an update that is not committed ends by itself.
        clock: seconds, monotonic.

    Raises:
        ContractError: a malformed manifest, or other names, shapes or dtypes than expected (INVALID_ARGUMENT).
        StatusError: FAILED_PRECONDITION, when the base is not the version held.
    """

    def __init__(
        self,
        manifest: pb.WeightManifest,
        expected: Expected,
        held: common.PolicyVersion | None,
        digest: str | None = None,
        deadline_seconds: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        validate_manifest(manifest)
        _check_tensors(manifest, expected)
        wanted = digest or digest_of(expected)
        if manifest.model_digest != wanted:
            raise ContractError("manifest.model_digest", f"is {manifest.model_digest}, the model's is {wanted}")
        _check_base(manifest, held)
        if not deadline_seconds > 0:
            raise ContractError("deadline_seconds", f"must be above 0, got {deadline_seconds}")
        self.manifest = manifest
        self._sources = {source.source_id: source for source in manifest.sources}
        self._next = dict.fromkeys(self._sources, 0)
        self._running: dict[str, dict[int, object]] = {
            source: {algorithm: make() for algorithm, make in _HASHERS.items()}
            if _unsummed(self._sources[source])
            else {}
            for source in self._sources
        }
        self._clock = clock
        self._began = clock()
        self._deadline = self._began + deadline_seconds
        self.bytes_loaded = 0

    @property
    def full(self) -> bool:
        """Whether the update replaces every tensor."""
        return not self.manifest.HasField("base_version")

    @property
    def seconds(self) -> float:
        """Seconds since Begin."""
        return self._clock() - self._began

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self._clock() >= self._deadline

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - self._clock())

    @property
    def complete(self) -> bool:
        """Whether every chunk of every source is loaded. A source without chunks is complete from the start."""
        return not self.missing()

    def missing(self) -> dict[str, int]:
        """Chunks not loaded yet, by source; complete sources are left out."""
        left = {source_id: len(source.chunks) - self._next[source_id] for source_id, source in self._sources.items()}
        return {source_id: count for source_id, count in left.items() if count}

    def check_load(self, source_id: str, chunks: Sequence[int]) -> list[pb.WeightChunk]:
        """The chunks that a LoadChunks call may load now.

        Raises:
            ContractError: an unknown source, or chunks that do not ascend from the next one of the source.
        """
        source = self._source(source_id)
        if not chunks:
            raise ContractError("chunks", f"must not be empty (source {source_id!r})")
        first = self._next[source_id]
        if list(chunks) != list(range(first, first + len(chunks))) or chunks[-1] >= len(source.chunks):
            left = f"{first} to {len(source.chunks) - 1}" if first < len(source.chunks) else "none; all are loaded"
            raise ContractError("chunks", f"source {source_id!r} takes next, in order: {left}; got {list(chunks)}")
        return [source.chunks[index] for index in chunks]

    def check_chunk(self, source_id: str, index: int, data) -> None:
        """Checks the bytes of a chunk before they are loaded.

        Raises:
            StatusError: DATA_LOSS, another length or checksum; the update must fail.
        """
        (chunk,) = self.check_load(source_id, [index])
        size = memoryview(data).nbytes
        what = f"update {self.manifest.update_id!r}, source {source_id!r}, chunk {index}"
        if size != chunk.bytes.length:
            raise _data_loss(f"{what}: expected {chunk.bytes.length} bytes, got {size}")
        if chunk.HasField("checksum"):
            _compare(checksum(data, chunk.checksum.algorithm), chunk.checksum, what)
        for hasher in self._running[source_id].values():
            hasher.update(data)

    def chunk_loaded(self, source_id: str, index: int) -> None:
        """Takes note that a chunk is in the model."""
        (chunk,) = self.check_load(source_id, [index])
        self._next[source_id] += 1
        self.bytes_loaded += chunk.bytes.length

    def check_totals(self, totals: Iterable[pb.SourceTotal]) -> None:
        """Checks what Commit states against the manifest.

        Raises:
            ContractError: a source that is missing, unknown or repeated, another number of chunks or bytes, or a source whose bytes
                neither a chunk nor its total has a checksum for.
        """
        given: dict[str, pb.SourceTotal] = {}
        for index, total in enumerate(totals):
            source = self._source(total.source_id, f"totals[{index}].source_id")
            if total.source_id in given:
                raise ContractError(f"totals[{index}].source_id", f"{total.source_id!r} is repeated")
            given[total.source_id] = total
            for name, want in (("chunks", len(source.chunks)), ("bytes", source.total_bytes)):
                if not total.HasField(name) or getattr(total, name) != want:
                    got = getattr(total, name) if total.HasField(name) else "nothing"
                    about = f"source {total.source_id!r}: the manifest says {want}, got {got}"
                    raise ContractError(f"totals[{index}].{name}", about)
            if not total.HasField("checksum") and _unsummed(source):
                raise ContractError(
                    f"totals[{index}].checksum",
                    f"source {total.source_id!r} has chunks without a checksum, so its total needs one",
                )
        lacking = sorted(set(self._sources) - set(given))
        if lacking:
            raise ContractError("totals", f"lacks the sources {', '.join(lacking)}")

    def check_checksums(self, totals: Iterable[pb.SourceTotal]) -> None:
        """Compares the checksums of sources that have chunks without one, once all is loaded.

        Raises:
            StatusError: DATA_LOSS, they differ; the update must fail.
        """
        for total in totals:
            hashers = self._running[total.source_id]
            if not (total.HasField("checksum") and hashers):
                continue
            if total.checksum.algorithm not in hashers:
                raise ContractError("totals.checksum.algorithm", f"not computed here: {total.checksum.algorithm}")
            actual = common.Checksum(
                algorithm=total.checksum.algorithm, value=hashers[total.checksum.algorithm].digest()
            )
            _compare(actual, total.checksum, f"update {self.manifest.update_id!r}, source {total.source_id!r}")

    def _source(self, source_id: str, field: str = "source_id") -> pb.WeightSource:
        if source_id not in self._sources:
            raise ContractError(field, f"unknown source {source_id!r}; valid: {', '.join(self._sources)}")
        return self._sources[source_id]


class ChunkAssembler:
    """Puts the parts of chunks (stream transport) together, one source at a time per call."""

    def __init__(self, update: UpdateReceiver, source_id: str):
        self._update = update
        self._source_id = source_id
        self._chunk: pb.WeightChunk | None = None
        self._parts = bytearray()

    def add(self, chunk: int, offset: int, data: bytes) -> bytes | None:
        """Adds a part; the whole chunk's bytes when it was the last one.

        Raises:
            ContractError: a chunk out of order, or a part that does not follow the one before.
        """
        if self._chunk is None:
            (self._chunk,) = self._update.check_load(self._source_id, [chunk])
            self._parts = bytearray()
        about = f"(source {self._source_id!r}, chunk {self._chunk.index})"
        if chunk != self._chunk.index:
            raise ContractError("chunk", f"{chunk} begins before the one before it is whole {about}")
        if offset != len(self._parts):
            raise ContractError("offset", f"must be {len(self._parts)}, got {offset} {about}")
        if offset + len(data) > self._chunk.bytes.length:
            end = offset + len(data)
            raise ContractError("data", f"ends at {end}, beyond the chunk's {self._chunk.bytes.length} bytes {about}")
        self._parts += data
        if len(self._parts) < self._chunk.bytes.length:
            return None
        self._chunk = None
        return bytes(self._parts)

    def end(self) -> None:
        """The stream ended.

        Raises:
            ContractError: in the middle of a chunk.
        """
        if self._chunk is not None:
            raise ContractError("data", f"the stream ended at byte {len(self._parts)} of chunk {self._chunk.index}")


def _unsummed(source: pb.WeightSource) -> bool:
    return any(not chunk.HasField("checksum") for chunk in source.chunks)


def _check_tensors(manifest: pb.WeightManifest, expected: Expected) -> None:
    violations = []
    for index, spec in enumerate(manifest.tensors):
        name = f"manifest.tensors[{index}]"
        if spec.name not in expected:
            violations.append((f"{name}.name", f"the model has no tensor {spec.name!r}"))
            continue
        dtype, shape = expected[spec.name]
        if spec.dtype != dtype:
            violations.append(
                (f"{name}.dtype", f"{spec.name!r}: expected {dtype_name(dtype)}, got {dtype_name(spec.dtype)}")
            )
        if tuple(spec.shape) != tuple(shape):
            violations.append((f"{name}.shape", f"{spec.name!r}: expected {list(shape)}, got {list(spec.shape)}"))
    if not manifest.HasField("base_version"):
        lacking = sorted(set(expected) - {spec.name for spec in manifest.tensors})
        violations += [("manifest.tensors", f"a full update lacks {name!r}") for name in lacking]
    if violations:
        # A wrong model differs in every tensor: the first few tell as much.
        (field, description), *more = violations[:20]
        raise ContractError(field, description, more)


def _check_base(manifest: pb.WeightManifest, held: common.PolicyVersion | None) -> None:
    if not manifest.HasField("base_version") or manifest.base_version == held:
        return
    has = show(held) if held is not None else "no version"
    raise StatusError(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"update {manifest.update_id!r} applies to {show(manifest.base_version)}, this engine holds {has}",
    )


def _compare(actual: common.Checksum, wanted: common.Checksum, what: str) -> None:
    if actual.value != wanted.value:
        raise _data_loss(f"{what}: checksum is {actual.value.hex()}, expected {wanted.value.hex()}")


def _data_loss(message: str) -> StatusError:
    return StatusError(grpc.StatusCode.DATA_LOSS, message)
