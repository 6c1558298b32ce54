"""Engines that come late: what the trainer's WeightService answers them."""

import contextlib

import grpc
import pytest
from fleet import fleet_of, send, weights

from vime_proto.channel import open_channel
from vime_proto.fakes import FakeEngine
from vime_proto.server import ServerOptions
from vime_proto.weights.v1 import weights_pb2, weights_pb2_grpc
from vime_trainer.service import RunStatus, serve_trainer


@contextlib.asynccontextmanager
async def weight_service(publisher):
    server = await serve_trainer("run", RunStatus(), publisher, ServerOptions())
    publisher.endpoint = server.address
    async with open_channel(server.address) as channel:
        yield weights_pb2_grpc.WeightServiceStub(channel)
    await server.stop(0)


@pytest.mark.parametrize("transport", ["shm", "stream"])
async def test_a_late_engine_fetches_the_newest_version(transport, tmp_path):
    async with fleet_of(FakeEngine(), tmp_path=tmp_path, transport=transport) as publisher:
        async with weight_service(publisher) as stub:
            request = weights_pb2.GetLatestManifestRequest(run_id="run")
            assert not (await stub.GetLatestManifest(request)).HasField("manifest")
            await send(publisher, 1, seed=2)
            manifest = (await stub.GetLatestManifest(request)).manifest
            assert manifest.sources[0].endpoint == publisher.endpoint
            data = {}
            fetch = weights_pb2.FetchTensorsRequest(update_id=manifest.update_id, source_id="rank-0")
            async for part in stub.FetchTensors(fetch):
                assert part.offset == len(data.get(part.chunk, b""))
                data[part.chunk] = data.get(part.chunk, b"") + part.data
            stream = b"".join(data[i] for i in sorted(data))
            for spec, (name, tensor) in zip(manifest.tensors, weights(2), strict=True):
                piece = spec.pieces[0].bytes
                assert spec.name == name
                assert stream[piece.offset : piece.offset + piece.length] == tensor.numpy().tobytes()
            one = weights_pb2.FetchTensorsRequest(update_id=manifest.update_id, source_id="rank-0", chunks=[1])
            assert b"".join([p.data async for p in stub.FetchTensors(one)]) == data[1]
            ack = weights_pb2.AckAppliedRequest(request_id="1", update_id=manifest.update_id, engine_id="late")
            await stub.AckApplied(ack)
            await stub.AckApplied(ack)


async def test_the_bytes_of_a_version_stay_while_somebody_reads_them(tmp_path):
    async with fleet_of(FakeEngine(), tmp_path=tmp_path) as publisher:
        await send(publisher, 1)
        first = publisher.latest.update_id
        publisher.reader_opened(first)
        await send(publisher, 2)
        assert (tmp_path / "shm" / first).exists()
        publisher.reader_closed(first)
        assert not (tmp_path / "shm" / first).exists()


async def test_manifests_are_watched_and_unknown_ones_are_refused(tmp_path):
    async with fleet_of(FakeEngine(), tmp_path=tmp_path) as publisher, weight_service(publisher) as stub:
        watch = stub.WatchManifests(weights_pb2.WatchManifestsRequest(run_id="run"))
        await send(publisher, 1)
        assert (await watch.read()).manifest.version.number == 1
        await send(publisher, 2)
        assert (await watch.read()).manifest.version.number == 2
        watch.cancel()
        for method, request, code in (
            (stub.GetLatestManifest, weights_pb2.GetLatestManifestRequest(run_id="x"), grpc.StatusCode.NOT_FOUND),
            (stub.AckApplied, weights_pb2.AckAppliedRequest(request_id="2"), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as error:
                await method(request)
            assert error.value.code() is code
        for fetch, code in (
            ({"update_id": "gone", "source_id": "rank-0"}, grpc.StatusCode.NOT_FOUND),
            ({"update_id": publisher.latest.update_id, "source_id": "x"}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"update_id": publisher.latest.update_id, "source_id": "rank-0", "chunks": [9]}, grpc.StatusCode.INVALID_ARGUMENT),
        ):  # fmt: skip
            with pytest.raises(grpc.RpcError) as error:
                async for _ in stub.FetchTensors(weights_pb2.FetchTensorsRequest(**fetch)):
                    pass
            assert error.value.code() is code
