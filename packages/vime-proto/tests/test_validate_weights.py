"""Weight manifests and transports."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.fakes import build, toy_weights
from vime_proto.validate import model_digest, validate_manifest, validate_transport
from vime_proto.validate._pieces import covered_once
from vime_proto.version import policy_version
from vime_proto.weights.v1 import weights_pb2 as pb

VERSION = policy_version("run", 0, 1)
NAMES = list(toy_weights(0))


def _manifest(sources=1, chunk_tensors=None):
    return build.manifest("u", VERSION, toy_weights(0), build.plan(NAMES, sources, chunk_tensors))[0]


@pytest.mark.parametrize("sources", [1, 2, 9])
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_a_whole_manifest_passes(sources, chunk):
    validate_manifest(_manifest(sources, chunk))


def test_the_digest_depends_on_the_architecture_alone():
    other = build.manifest("v", policy_version("x", 1, 9), toy_weights(5), build.plan(NAMES[::-1], 3, 1))[0]
    assert other.model_digest == _manifest().model_digest
    tensors = toy_weights(0)
    tensors["extra"] = (np.zeros((), np.float32), common.DTYPE_FLOAT32)
    assert build.manifest("u", VERSION, tensors)[0].model_digest != other.model_digest
    bits = {"w": (np.zeros(4, np.uint16), common.DTYPE_BFLOAT16)}
    halves = {"w": (np.zeros(4, np.float16), common.DTYPE_FLOAT16)}
    assert build.manifest("u", VERSION, bits)[0].model_digest != build.manifest("u", VERSION, halves)[0].model_digest


def test_the_digest_of_a_known_architecture():
    spec = pb.TensorSpec(name="w", dtype=common.DTYPE_BFLOAT16, shape=[2, 3])
    # printf 'w bfloat16 2,3\n' | sha256sum
    assert model_digest([spec]) == "5be7b4b701bd39d4a89a686325ea023fb928f8454a1ab8a954e79b82408a007b"


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda m: m.ClearField("update_id"), "update_id"),
        (lambda m: setattr(m, "update_id", "a/b"), "update_id"),
        (lambda m: setattr(m, "update_id", ".."), "update_id"),
        (lambda m: m.ClearField("version"), "version"),
        (lambda m: m.version.ClearField("lineage"), "version.lineage"),
        (lambda m: m.ClearField("sources"), "sources"),
        (lambda m: m.sources.append(m.sources[0]), "sources[2].source_id"),
        (lambda m: setattr(m.sources[0], "source_id", "../x"), "sources[0].source_id"),
        (lambda m: setattr(m.sources[0], "endpoint", "nowhere"), "address"),
        (lambda m: m.sources[0].ClearField("total_bytes"), "sources[0].total_bytes"),
        (lambda m: setattr(m.sources[0], "total_bytes", 0), "sources[0].total_bytes"),
        (lambda m: setattr(m.sources[0].chunks[1], "index", 5), "chunks[1].index"),
        (lambda m: m.sources[0].chunks[0].ClearField("index"), "chunks[0].index"),
        (lambda m: setattr(m.sources[0].chunks[1].bytes, "offset", 3), "chunks[1].bytes.offset"),
        (lambda m: m.sources[0].chunks[0].tensors.append("nobody"), "chunks[0].tensors"),
        (lambda m: m.ClearField("tensors"), "tensors"),
        (lambda m: m.tensors.append(m.tensors[0]), "tensors[5].name"),
        (lambda m: m.tensors[0].ClearField("name"), "tensors[0].name"),
        (lambda m: m.tensors[0].ClearField("dtype"), "tensors[0].dtype"),
        (lambda m: m.tensors[0].ClearField("pieces"), "tensors[0].pieces"),
        (lambda m: setattr(m.tensors[0].pieces[0], "source_id", "nobody"), "pieces[0].source_id"),
        (lambda m: setattr(m.tensors[0].pieces[0].bytes, "length", 4), "pieces[0].bytes.length"),
        (lambda m: setattr(m.tensors[0].pieces[0].bytes, "offset", 1 << 40), "pieces[0].bytes"),
        (lambda m: m.tensors[0].pieces[0].start.append(0), "pieces[0].start"),
        (lambda m: m.tensors[0].shape.append(2), "pieces[0].bytes.length"),
        (lambda m: setattr(m, "model_digest", "x"), "model_digest"),
        (lambda m: m.ClearField("model_digest"), "model_digest"),
    ],
)
def test_what_is_wrong_is_named(spoil, field):
    manifest = _manifest(2, 1)
    spoil(manifest)
    with pytest.raises(ContractError) as caught:
        validate_manifest(manifest)
    assert field in caught.value.violations[0][0]


def test_bytes_that_belong_to_two_tensors_or_none_are_refused():
    manifest = _manifest()
    manifest.tensors[1].pieces[0].bytes.offset -= 4
    with pytest.raises(ContractError, match="belong to two pieces"):
        validate_manifest(manifest)
    manifest = _manifest()
    manifest.sources[0].chunks[0].bytes.length += 4
    manifest.sources[0].total_bytes += 4
    with pytest.raises(ContractError, match="belong to no piece"):
        validate_manifest(manifest)


def _split(manifest, name: str, cut: int) -> None:
    """Cuts a tensor of one source by rows into two pieces."""
    (spec,) = [spec for spec in manifest.tensors if spec.name == name]
    piece = spec.pieces[0]
    rows, rest = spec.shape[0], list(spec.shape[1:])
    row_bytes = piece.bytes.length // rows
    second = spec.pieces.add(source_id=piece.source_id, start=[cut] + [0] * len(rest), shape=[rows - cut, *rest])
    second.bytes.offset = piece.bytes.offset + cut * row_bytes
    second.bytes.length = piece.bytes.length - cut * row_bytes
    piece.start.extend([0] * len(spec.shape))
    piece.shape.extend([cut, *rest])
    piece.bytes.length = cut * row_bytes


def test_pieces_cover_a_tensor_once():
    manifest = _manifest()
    _split(manifest, "lm_head.weight", 5)
    validate_manifest(manifest)
    (spec,) = [spec for spec in manifest.tensors if spec.name == "lm_head.weight"]
    spec.pieces[1].start[0] = 4
    with pytest.raises(ContractError, match="lm_head.weight"):
        validate_manifest(manifest)


@st.composite
def tilings(draw):
    """A shape, and boxes that cover it once: made by cutting."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        index, axis = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        first, extent = boxes[index]
        if extent[axis] < 2:
            continue
        cut = draw(st.integers(1, extent[axis] - 1))
        low = extent[:axis] + (cut,) + extent[axis + 1 :]
        high = extent[:axis] + (extent[axis] - cut,) + extent[axis + 1 :]
        moved = first[:axis] + (first[axis] + cut,) + first[axis + 1 :]
        boxes[index : index + 1] = [(first, low), (moved, high)]
    return shape, draw(st.permutations(boxes))


@given(tilings())
def test_cut_boxes_cover_once(tiling):
    shape, boxes = tiling
    assert covered_once(list(boxes), shape)
    assert not covered_once(list(boxes)[1:], shape)
    assert not covered_once([*boxes, boxes[0]], shape)


def test_equal_volume_with_overlap_is_no_cover():
    assert not covered_once([((0, 0), (2, 2)), ((1, 0), (1, 2)), ((0, 0), (1, 2))], (4, 2))
    assert covered_once([((), ())], ())
    assert covered_once([], (0, 3))


NCCL = {"store_address": "h:1", "world_size": 3, "group_id": "g", "timeout_seconds": 1.0}
HANDLE = {"gpu_uuid": "GPU-1", "memory_handle": b"x" * 64, "event_handle": b"y" * 64}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"file": pb.FileTransport(root_uri="file:///x")}, "file"),
        ({"shm": pb.ShmTransport(root="/dev/shm/x")}, "shm"),
        ({"stream": pb.StreamTransport()}, "stream"),
        ({"nccl": pb.NcclTransport(**NCCL, rank_offsets={"e": 1})}, "nccl"),
        ({"cuda_ipc": pb.CudaIpcTransport(handles={"s": pb.CudaIpcTransport.Handle(**HANDLE)})}, "cuda_ipc"),
    ],
)
def test_every_transport_passes_where_it_is_available(fields, kind):
    config = pb.TransportConfig(transport_id="t", **fields)
    assert validate_transport(config) == kind
    with pytest.raises(ContractError, match="valid: other"):
        validate_transport(config, ["other"])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "config.transport"),
        ({"file": pb.FileTransport()}, "file.root_uri"),
        ({"shm": pb.ShmTransport(root="relative")}, "shm.root"),
        ({"nccl": pb.NcclTransport(**{**NCCL, "world_size": 1})}, "nccl.world_size"),
        ({"nccl": pb.NcclTransport(**{**NCCL, "timeout_seconds": 0})}, "nccl.timeout_seconds"),
        ({"nccl": pb.NcclTransport(**NCCL, rank_offsets={"e": 3})}, "rank_offsets"),
        ({"cuda_ipc": pb.CudaIpcTransport(handles={"s": pb.CudaIpcTransport.Handle(gpu_uuid="g")})}, "memory_handle"),
    ],
)
def test_a_spoilt_transport_is_named(fields, field):
    with pytest.raises(ContractError) as caught:
        validate_transport(pb.TransportConfig(transport_id="t", **fields))
    assert field in caught.value.violations[0][0]
