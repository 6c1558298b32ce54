"""Exported batches behind a buffer: samples come over gRPC, cut to what was asked for, and what comes is counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.channel import open_channel
from vime_proto.fakes import FakeBuffer, serve
from vime_proto.fakes._buffer_rows import PromptRow, RunRow
from vime_proto.version import LineageTree
from vime_trainer.rl import FolderSource, RlSettings
from vime_trainer.rl._buffer import BufferClient
from vime_trainer.rl._io import IoThread


@contextlib.contextmanager
def served_folder(settings: RlSettings) -> Iterator[tuple[Callable[..., FolderSource], list[dict[str, int]]]]:
    """What makes a FolderSource whose samples come from a buffer; and, of each fetch, the bytes of routes by sample."""
    buffer, received, io = FakeBuffer(), [], IoThread()
    run = RunRow(opened=pb.OpenRunRequest(run_id=settings.run_id), tree=LineageTree([]))
    buffer.store.runs[settings.run_id] = run
    stack = contextlib.AsyncExitStack()

    async def opened():
        server = await stack.enter_async_context(serve(buffer))
        return await stack.enter_async_context(open_channel(server.address))

    class ServedFolder(FolderSource):
        def fetch(self, leased, samples=None, routes=None):
            groups = self._groups_of(leased.index.batch_id)
            run.prompts.update({one.group_id: PromptRow(one.prompt, group=one) for one in groups})
            found = client.fetch(leased, samples, routes)
            received.append({name: len(sample.routing.inline) for name, sample in found.items()})
            return found

    try:
        client = BufferClient(settings, io, io.run(opened()), "1")
        yield ServedFolder, received
    finally:
        io.finish(stack.aclose(), 10)
        io.close()
