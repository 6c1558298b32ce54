"""PutBlob, GetBlob."""

from __future__ import annotations

import asyncio
import hashlib

import grpc

from vime_buffer._service.core import Core
from vime_buffer._store import payloads, requests, runs
from vime_buffer._store.database import Transaction
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.checksum import verify
from vime_proto.errors import ContractError, StatusError

_PART_BYTES = 4 << 20
# A blob is held in memory until its checksum is known to be right.
_MOST_BYTES = 1 << 30
_METHOD = "PutBlob"


class BlobCalls:
    """Calls about large payloads."""

    core: Core

    async def PutBlob(self, request_iterator, context) -> pb.PutBlobResponse:
        first: pb.PutBlobRequest | None = None
        data = bytearray()
        checksum = None
        async for part in request_iterator:
            first = first or part
            data += part.data
            if len(data) > _MOST_BYTES:
                raise ContractError("data", f"a blob has at most {_MOST_BYTES} bytes")
            checksum = part.checksum if part.HasField("checksum") else None
        if first is None:
            raise ContractError("run_id", "the stream held no message; the first states run_id and request_id")
        requests.check_request_id(first.request_id)
        if checksum is None:
            raise ContractError("checksum", f"must be in the last message (request {first.request_id!r})")
        await self.core.work(verify, data, checksum, f"blob of request {first.request_id!r}")
        return await asyncio.shield(self.core.finish(self._store(first, bytes(data))))

    async def _store(self, first: pb.PutBlobRequest, data: bytes) -> pb.PutBlobResponse:
        digest = (await self.core.work(lambda: hashlib.blake2b(data, digest_size=16))).digest()
        file = await self.core.work(self.core.files.write, data)
        kept = [False]

        def store(tx: Transaction) -> pb.PutBlobResponse:
            known = requests.recall(tx, first.run_id, _METHOD, first.request_id, digest, pb.PutBlobResponse)
            if known is not None:
                return known
            runs.get(tx, first.run_id)
            payloads.insert_blob(tx, first.run_id, file)
            response = pb.PutBlobResponse(blob_id=file.blob_id, length=file.length)
            requests.remember(tx, first.run_id, _METHOD, first.request_id, digest, response)
            kept[0] = True
            return response

        try:
            return await self.core.database.run(store)
        except BaseException:
            kept[0] = False
            raise
        finally:
            if not kept[0]:
                await self.core.work(self.core.files.delete, [file.path])

    async def GetBlob(self, request: pb.GetBlobRequest, context):
        def look(tx: Transaction) -> payloads.StoredFile | None:
            runs.get(tx, request.run_id)
            return payloads.find_blob(tx, request.run_id, request.blob_id)

        file = await self.core.work(self.core.database.read, look)
        if file is None:
            raise StatusError(grpc.StatusCode.NOT_FOUND, f"no blob {request.blob_id!r} in run {request.run_id!r}")
        spans = [(one.offset, one.length) for one in request.ranges] or [(0, file.length)]
        for index, (offset, length) in enumerate(spans):
            if offset + length > file.length:
                raise ContractError(
                    f"ranges[{index}]",
                    f"bytes [{offset}, {offset + length}) are beyond the {file.length} of blob {file.blob_id!r}",
                )
        for offset, length in spans:
            for start in range(offset, offset + length, _PART_BYTES):
                wanted = min(_PART_BYTES, offset + length - start)
                yield pb.GetBlobResponse(data=await self.core.work(self.core.files.read, file.path, start, wanted))
