"""Command line: ``vime-buffer serve``, ``vime-buffer stats``."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from google.protobuf import json_format
from pydantic import Field

from vime_buffer import __version__
from vime_buffer._loading import HookError
from vime_buffer.settings import BufferSettings
from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.buffer.v1.buffer_pb2_grpc import BufferServiceStub
from vime_proto.channel import open_sync_channel, sync_call
from vime_proto.errors import ContractError, describe, nearest
from vime_proto.process import exit_with_parent, stop_event, write_address_file
from vime_proto.settings import Settings, load

_USAGE = """usage: vime-buffer COMMAND [--key value ...]

commands:
  serve   run the buffer
  stats   print the counters of a run as JSON

vime-buffer COMMAND --help lists the keys of a command."""


class StatsSettings(Settings):
    """Configuration of ``vime-buffer stats``."""

    address: str = Field(description="host:port of the buffer")
    run_id: str = Field(description="the run")
    token_file: str | None = Field(None, description="file with the bearer token")
    tls_ca: str | None = Field(None, description="PEM file of the authority that signed the server's certificate")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command and exits."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {"serve": _serve, "stats": _stats}
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE)
        raise SystemExit(0 if words else 2)
    if words[0] == "--version":
        print(__version__)
        raise SystemExit(0)
    if words[0] not in commands:
        _fail(nearest(words[0], commands, "command"), 2)
    commands[words[0]](words[1:])


def _fail(message: str, code: int = 1) -> None:
    print(f"vime-buffer: {message}", file=sys.stderr)
    raise SystemExit(code)


def _serve(argv: Sequence[str]) -> None:
    settings = load(BufferSettings, argv, "vime-buffer serve")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if settings.exit_with_parent:
        exit_with_parent()
    from sqlalchemy.exc import SQLAlchemyError

    try:
        asyncio.run(_run(settings))
    except (ContractError, HookError, OSError) as error:
        _fail(str(error))
    except SQLAlchemyError as error:
        _fail(f"database {settings.database}: {str(error).splitlines()[0]}")


async def _run(settings: BufferSettings) -> None:
    stopped = stop_event()
    from vime_buffer import BufferServer

    server = await BufferServer.start(settings)
    try:
        if settings.address_file:
            write_address_file(settings.address_file, server.address)
        print(f"listening on {server.address}", flush=True)
        waiting = [asyncio.create_task(stopped.wait()), asyncio.create_task(server.wait())]
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        for task in done:
            task.result()
    finally:
        await server.stop()


def _stats(argv: Sequence[str]) -> None:
    settings = load(StatsSettings, argv, "vime-buffer stats")
    try:
        token = Path(settings.token_file).read_text().strip() if settings.token_file else None
        with open_sync_channel(settings.address, token=token, tls_ca=settings.tls_ca) as channel:
            answer = sync_call(BufferServiceStub(channel).GetStats, pb.GetStatsRequest(run_id=settings.run_id), timeout=5)
    except grpc.RpcError as error:
        _fail(f"{settings.address}: {describe(error)}")
    except (ContractError, OSError) as error:
        _fail(str(error))
    else:
        print(
            json_format.MessageToJson(
                answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
        )
