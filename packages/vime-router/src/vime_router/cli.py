"""Command line: ``vime-router serve`` and ``vime-router list``."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from pydantic import Field

from vime_proto.channel import open_channel
from vime_proto.errors import StatusError, describe, nearest
from vime_proto.process import exit_with_parent, stop_event, write_address_file
from vime_proto.router.v1 import router_pb2 as pb
from vime_proto.router.v1 import router_pb2_grpc
from vime_proto.settings import Settings, load
from vime_proto.version import show
from vime_router import __version__
from vime_router.server import serve
from vime_router.settings import RouterSettings

_USAGE = """usage: vime-router COMMAND [--key value ...]

commands:
  serve   pass requests on to a fleet of engines
  list    print the engines of a running router

vime-router COMMAND --help lists the keys of a command."""


class ListSettings(Settings):
    """Which router to ask."""

    address: str = Field(description="host:port of the router")
    token_file: str | None = Field(None, description="file with the bearer token that the router asks for")
    tls_ca: str | None = Field(None, description="PEM file of the authority that signed the router's certificate")
    refresh: bool = Field(False, description="ask the engines now instead of showing the last check")


async def _serve(settings: RouterSettings) -> None:
    stopped = stop_event()
    async with serve(settings) as server:
        if settings.address_file:
            write_address_file(settings.address_file, server.address)
        print(f"listening on {server.address}", flush=True)
        await stopped.wait()


async def _list(settings: ListSettings) -> None:
    token = Path(settings.token_file).read_text().strip() if settings.token_file else None
    async with open_channel(settings.address, token=token, tls_ca=settings.tls_ca) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        fleet = await stub.ListEngines(pb.ListEnginesRequest(refresh=settings.refresh), timeout=30)
    bound = f", minimum version {show(fleet.minimum_version)}" if fleet.HasField("minimum_version") else ""
    print(f"policy {fleet.policy}, {fleet.queued} queued{bound}")
    print("engine\taddress\thealth\tversion\trequests\treason")
    for engine in fleet.engines:
        version = show(engine.status.version) if engine.status.HasField("version") else "-"
        health = pb.EngineHealth.Name(engine.health).removeprefix("ENGINE_HEALTH_").lower()
        print(
            f"{engine.engine_id}\t{engine.address}\t{health}\t{version}\t{engine.outstanding_requests}\t{engine.reason}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; answers the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {"serve": (RouterSettings, _serve), "list": (ListSettings, _list)}
    if words and words[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    if words and words[0] == "--version":
        print(__version__)
        return 0
    if not words or words[0] not in commands:
        name = words[0] if words else ""
        print(f"vime-router: {nearest(name, commands, 'command')}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    kind, run = commands[words[0]]
    settings = load(kind, words[1:], f"vime-router {words[0]}")
    if getattr(settings, "exit_with_parent", False):
        exit_with_parent()
    try:
        asyncio.run(run(settings))
    except (OSError, ValueError, StatusError) as error:
        print(f"vime-router: {error}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        print(f"vime-router: {describe(error)}", file=sys.stderr)
        return 1
    return 0
