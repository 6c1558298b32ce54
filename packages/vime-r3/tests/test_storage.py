import numpy as np
import pytest

from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_proto.version import policy_version
from vime_r3.storage import TraceFiles
from vime_r3.trace import byte_ranges, decode, encode

pytest.importorskip("fsspec")
V1 = policy_version("run", 0, 1)


@pytest.fixture(params=["folder", "memory"])
def root(request, tmp_path):
    return str(tmp_path / "routes") if request.param == "folder" else f"memory://routes-{tmp_path.name}"


@pytest.fixture
def trace(make_ids):
    return encode(make_ids(64), layer_ids=range(4), experts=8, version=V1, chunk_rows=8, chunk_layers=2)


def test_a_trace_comes_back_from_its_uri(root, trace):
    files = TraceFiles(root)
    moved = files.write(trace, "batch-7/sample.0")
    assert moved.header == trace.header and moved.WhichOneof("payload") == "uri" and "sample.0" in moved.uri
    assert files.read(pb.RoutingTrace.FromString(moved.SerializeToString())) == trace
    np.testing.assert_array_equal(decode(moved, payload=files.reader(moved)).ids, decode(trace).ids)
    files.delete(moved)
    files.delete(moved)
    with pytest.raises(FileNotFoundError):
        files.read(moved)


def test_only_chunks_of_the_part_are_read(root, trace, monkeypatch):
    files = TraceFiles(root)
    moved = files.write(trace, "one")
    reads = []
    original = type(files._fs).cat_file

    def counted(self, path, start=None, end=None, **more):
        reads.append((start, end - start))
        return original(self, path, start=start, end=end, **more)

    monkeypatch.setattr(type(files._fs), "cat_file", counted)
    part = files.read(moved, rows=(10, 20), layer_ids=[2, 3])
    touched = byte_ranges(trace.header, rows=(10, 20), layer_ids=[2, 3])
    assert sorted(reads) == sorted((offset, length) for _, offset, length in touched) and len(reads) == 2
    np.testing.assert_array_equal(decode(part).ids, decode(trace).ids[10:20, 2:])


def test_nothing_outside_the_root_is_touched(root, trace, tmp_path):
    files = TraceFiles(root)
    (tmp_path / "secret").write_bytes(trace.inline)
    inside = files.write(trace, "one").uri
    for uri in (f"file://{tmp_path}/secret", inside.replace("one", "../secret"), f"{root}-other/one", "memory://one"):
        elsewhere = pb.RoutingTrace(header=trace.header, uri=uri)
        for use in (files.read, files.delete):
            with pytest.raises(ContractError, match="uri: .* is not below"):
                use(elsewhere)
    for name in ("", "/one", "../one", "a//b", "a/../b", "a b"):
        with pytest.raises(ContractError, match="name: "):
            files.write(trace, name)


def test_other_payloads_are_refused(root, trace):
    files = TraceFiles(root)
    with pytest.raises(ContractError, match="is inline, not at a URI"):
        files.read(trace)
    with pytest.raises(ContractError, match="must be inline, 512 bytes"):
        files.write(pb.RoutingTrace(header=trace.header, blob_id="b"), "one")


def test_a_file_that_was_cut_short_is_refused(tmp_path, trace):
    files = TraceFiles(str(tmp_path))
    moved = files.write(trace, "one")
    (tmp_path / "one").write_bytes(trace.inline[:-10])
    with pytest.raises(ContractError, match="bytes could be read"):
        files.read(moved)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_missing_fsspec_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(ImportError, match=r"vime-r3\[storage\]"):
        TraceFiles("routes")
