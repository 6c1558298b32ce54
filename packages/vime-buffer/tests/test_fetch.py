"""Samples and blobs on their way out."""

import asyncio

import builders as b
import grpc
import numpy as np
import pytest

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.checksum import checksum, verify
from vime_proto.common.v1 import common_pb2
from vime_proto.tensor import to_numpy, to_tensor
from vime_proto.validate import validate_trace

LAYERS = (1, 2, 3, 5)


def _decode(trace):
    """Ids by row and layer number, read off the chunks that are no holes."""
    import zstandard

    header = trace.header
    found = {}
    holes = {row for hole in header.holes for row in range(hole.start, hole.stop)}
    for chunk in header.chunks:
        stored = trace.inline[chunk.stored.offset : chunk.stored.offset + chunk.stored.length]
        verify(stored, chunk.checksum, "chunk")
        raw = stored
        if chunk.compression == b.routing_pb2.COMPRESSION_ZSTD:
            raw = zstandard.ZstdDecompressor().decompress(stored)
        assert len(raw) == chunk.raw_length
        block = np.frombuffer(raw, np.uint8).reshape(
            chunk.rows.stop - chunk.rows.start, chunk.layers.stop - chunk.layers.start, header.top_k
        )
        for i, row in enumerate(range(chunk.rows.start, chunk.rows.stop)):
            for j, layer in enumerate(range(chunk.layers.start, chunk.layers.stop)):
                if row not in holes:
                    assert (row, header.layer_ids[layer]) not in found
                    found[row, header.layer_ids[layer]] = block[i, j].tolist()
    return found, holes


async def _store(client, routing, tokens=9):
    await client.open(batch_groups=1, group_size=1)
    await client.put("a")
    lease = (await client.lease()).leases[0]
    await client.commit(lease, tokens=tokens - 3, routing=routing)
    batch = await client.batch()
    return batch.groups[0].rollouts[0].samples[0]


CHUNKS = [None, [((0, 3), (0, 4)), ((3, 8), (0, 4))], [((0, 8), (0, 1)), ((0, 5), (1, 4)), ((5, 8), (1, 4))]]
CUTS = [
    ([], None),
    ([(2, 5)], None),
    ([(0, 1), (6, 8)], (2, 4)),
    ([], (5, 6)),
    ([(4, 4)], None),
    ([(7, 99)], (0, 3)),
    ([], (4, 5)),
]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inline_bytes", [1 << 20, 0])
async def test_routing_rows_and_layers(start, inline_bytes, packed, chunks):
    routing, ids = b.trace(8, LAYERS, chunks=chunks, packed=packed)
    async with start(inline_bytes=inline_bytes) as client:
        stored = await _store(client, routing)
        assert stored.routing_bytes == len(routing.inline)
        for rows, layers in CUTS:
            (answer,) = await client.fetch(
                stored.sample_id,
                rows=[common_pb2.IndexRange(start=low, stop=high) for low, high in rows],
                layers=None if layers is None else common_pb2.IndexRange(start=layers[0], stop=layers[1]),
            )
            _check_cut(answer.sample.routing, ids, rows, layers, exact=not packed)


def _check_cut(trace, ids, rows, layers, exact):
    assert trace.header.rows == 8 and trace.header.payload_length == len(trace.inline)
    wanted_rows = {row for low, high in rows or [(0, 8)] for row in range(low, min(high, 8))}
    wanted_layers = [one for one in LAYERS if layers is None or layers[0] <= one < layers[1]]
    assert list(trace.header.layer_ids) == wanted_layers
    found, holes = _decode(trace)
    assert holes == set(range(8)) - wanted_rows
    assert found == {
        (row, layer): ids[row, LAYERS.index(layer)].tolist() for row in wanted_rows for layer in wanted_layers
    }
    spanned = {row for span in trace.header.spans for row in range(span.rows.start, span.rows.stop)}
    assert spanned == wanted_rows
    if wanted_layers:
        validate_trace(trace, tokens=9)
    if exact:
        assert len(trace.inline) == len(wanted_rows) * len(wanted_layers) * 2


async def test_the_whole_trace_comes_back_bit_for_bit(client):
    routing, _ = b.trace(8, LAYERS, chunks=[((0, 3), (0, 4)), ((3, 8), (0, 4))], packed=True)
    stored = await _store(client, routing)
    (answer,) = await client.fetch(stored.sample_id)
    assert answer.sample.routing == routing


@pytest.mark.parametrize("inline_bytes", [1 << 20, 0])
async def test_samples_come_back_as_committed(start, inline_bytes):
    async with start(inline_bytes=inline_bytes) as client:
        await client.open(batch_groups=1, group_size=2)
        await client.put("a")
        lease = (await client.lease()).leases[0]
        group = b.group(lease)
        stream = to_tensor(np.arange(4, dtype=np.float32))
        group.rollouts[0].samples[0].segments[1].streams["entropy"].CopyFrom(stream)
        await client.commit(lease, group)
        sent = [sample for rollout in group.rollouts for sample in rollout.samples]
        answers = await client.fetch(*(one.sample_id for one in sent))
        assert [one.sample for one in answers] == sent
        stored = client.server.core.files
        files = [path for path in stored._fs.find(stored._root) if path != stored.claim]
        assert len(files) == (0 if inline_bytes else 2)


async def test_only_the_parts_asked_for_are_sent(client):
    routing, _ = b.trace(8, LAYERS)
    stored = await _store(client, routing)
    (answer,) = await client.fetch(stored.sample_id, fields=[pb.SAMPLE_FIELD_TOKENS])
    segment = answer.sample.segments[1]
    assert not answer.sample.HasField("routing") and not segment.HasField("generation")
    assert segment.trainable_all and to_numpy(segment.token_ids).tolist() == list(range(6))
    (answer,) = await client.fetch(stored.sample_id, fields=[pb.SAMPLE_FIELD_GENERATION])
    segment = answer.sample.segments[1]
    assert segment.generation.version.number == 0 and not segment.HasField("token_ids")
    (answer,) = await client.fetch(stored.sample_id, fields=[pb.SAMPLE_FIELD_ROUTING])
    assert answer.sample.routing.inline == routing.inline


async def test_bad_fetches_are_refused(client, refused):
    await client.open()
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "fields[0]", "SAMPLE_FIELD_TOKENS"):
        await client.fetch("x", fields=[9])
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "routing_rows"):
        await client.fetch("x", rows=[common_pb2.IndexRange(start=3, stop=1)])


def _put_requests(data, parts=3, request_id="blob", check=None):
    size = max(1, -(-len(data) // parts))
    pieces = [data[i : i + size] for i in range(0, len(data), size)] or [b""]
    for i, piece in enumerate(pieces):
        yield pb.PutBlobRequest(
            run_id=b.RUN if i == 0 else "",
            request_id=request_id if i == 0 else "",
            data=piece,
            checksum=(check or checksum(data)) if i == len(pieces) - 1 else None,
        )


async def _put(client, data, **options):
    return await client.stub.PutBlob(iter(list(_put_requests(data, **options))))


async def _get(client, blob_id, *ranges):
    request = pb.GetBlobRequest(
        run_id=b.RUN, blob_id=blob_id, ranges=[common_pb2.ByteRange(offset=o, length=n) for o, n in ranges]
    )
    return b"".join([part.data async for part in client.stub.GetBlob(request)])


async def test_blobs_are_stored_checked_and_served_by_range(client, refused):
    await client.open()
    data = bytes(range(256)) * 100
    blob = await _put(client, data)
    assert blob.length == len(data)
    assert await _put(client, data) == blob
    assert await _get(client, blob.blob_id) == data
    assert await _get(client, blob.blob_id, (10, 5), (0, 2)) == data[10:15] + data[:2]
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "ranges[0]", blob.blob_id):
        await _get(client, blob.blob_id, (len(data) - 1, 2))
    with refused(grpc.StatusCode.NOT_FOUND, "'nothing'"):
        await _get(client, "nothing")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "checksum"):
        await _put(client, data, request_id="other", check=checksum(b"something else"))
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "request_id", "another payload"):
        await _put(client, data + b"x")
    assert len(client.server.core.files._fs.find(client.server.core.files._root)) == 2  # and the claim


async def _no_file_is_left(client):
    # A file goes after its row has gone.
    files = client.server.core.files
    async with asyncio.timeout(10):
        while files._fs.find(files._root) != [files.claim]:
            await client.stats()


async def test_a_trace_in_a_blob_belongs_to_its_sample_until_it_is_collected(client, refused):
    routing, ids = b.trace(8, LAYERS)
    await client.open(batch_groups=1, group_size=1, max_staleness=1)
    blob = await _put(client, routing.inline)
    routing.blob_id = blob.blob_id
    await client.put("a", "b")
    first, second = (await client.lease()).leases
    await client.commit(first, tokens=6, routing=routing)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "routing.blob_id", blob.blob_id, "belongs to sample"):
        await client.commit(second, tokens=6, routing=routing)
    routing.blob_id = "nothing"
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "unknown blob 'nothing'"):
        await client.commit(second, tokens=6, routing=routing)
    batch = await client.batch()
    index = batch.groups[0].rollouts[0].samples[0]
    assert index.routing_bytes == blob.length
    (answer,) = await client.fetch(index.sample_id, rows=[common_pb2.IndexRange(start=2, stop=4)])
    found, _ = _decode(answer.sample.routing)
    assert found[3, 5] == ids[3, 3].tolist() and len(found) == 8
    await client.ack(batch)
    await client.checkpoint(1, 1)
    with refused(grpc.StatusCode.NOT_FOUND):
        await _get(client, blob.blob_id)
    await _no_file_is_left(client)


async def test_payloads_of_groups_that_are_not_kept_leave_no_file(start):
    routing, _ = b.trace(8, LAYERS)
    async with start(inline_bytes=0, group_filter="nonzero_std") as client:
        await client.open(batch_groups=1, group_size=1)
        await client.put("a")
        lease = (await client.lease()).leases[0]
        blob = await _put(client, routing.inline)
        routing.blob_id = blob.blob_id
        answer = await client.commit(lease, tokens=6, routing=routing)
        assert answer.outcome == pb.COMMIT_OUTCOME_FILTERED
        await _no_file_is_left(client)
        assert (await client.stats()).payload_bytes == 0


async def test_traces_by_uri_must_lie_below_a_root(start, refused, tmp_path):
    root = tmp_path / "traces"
    root.mkdir()
    routing, ids = b.trace(8, LAYERS)
    (root / "one").write_bytes(routing.inline)
    (tmp_path / "secret").write_bytes(routing.inline)
    async with start(trace_roots=[str(root)]) as client:
        await client.open(batch_groups=1, group_size=1)
        await client.put("a")
        lease = (await client.lease()).leases[0]
        for outside in (f"file://{tmp_path}/secret", f"file://{root}/../secret"):
            routing.uri = outside
            with refused(grpc.StatusCode.INVALID_ARGUMENT, "routing.uri", "trace_roots"):
                await client.commit(lease, tokens=6, routing=routing)
        routing.uri = f"file://{root}/one"
        await client.commit(lease, tokens=6, routing=routing)
        batch = await client.batch()
        (answer,) = await client.fetch(
            batch.groups[0].rollouts[0].samples[0].sample_id, layers=common_pb2.IndexRange(start=3, stop=4)
        )
        found, _ = _decode(answer.sample.routing)
        assert found == {(row, 3): ids[row, 2].tolist() for row in range(8)}
        await client.ack(batch)
        await client.checkpoint(1, 1)
        await client.stats()
    assert not (root / "one").exists()
