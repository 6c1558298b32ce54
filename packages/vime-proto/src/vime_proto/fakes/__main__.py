"""``python -m vime_proto.fakes buffer|engine|router --address host:port``: serves a fake until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio

from vime_proto.fakes import FakeBuffer, FakeEngine, FakeRouter, build, serve
from vime_proto.process import stop_event, write_address_file
from vime_proto.server import ServerOptions

EVALUATION_SET = "conformance"


def make(arguments: argparse.Namespace):
    """The fake that the command line asks for."""
    if arguments.fake == "buffer":
        questions = [build.prompt(f"question-{i}", row=i, answer=str(i)) for i in range(4)]
        return FakeBuffer(evaluations={EVALUATION_SET: questions}, lease_ttl_seconds=arguments.lease_ttl_seconds)
    if arguments.fake == "engine":
        return FakeEngine(engine_id=arguments.engine_id)
    return FakeRouter(engines=dict(entry.partition("=")[::2] for entry in arguments.engine))


async def main(arguments: argparse.Namespace) -> None:
    """Serves until stopped."""
    stopped = stop_event()
    async with serve(make(arguments), ServerOptions(address=arguments.address)) as server:
        if arguments.address_file:
            write_address_file(arguments.address_file, server.address)
        print(f"listening on {server.address}", flush=True)
        await stopped.wait()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m vime_proto.fakes", allow_abbrev=False, description=__doc__)
    result.add_argument("fake", choices=["buffer", "engine", "router"])
    result.add_argument("--address", default="127.0.0.1:0", help="host:port; port 0 takes a free one")
    result.add_argument("--address-file", help="file that the bound address is written to")
    result.add_argument("--engine-id", default="engine-0", help="id of the engine")
    result.add_argument(
        "--engine", action="append", default=[], metavar="ID=HOST:PORT", help="engine of the router; repeatable"
    )
    result.add_argument("--lease-ttl-seconds", type=float, default=2.0, help="how long the buffer's leases hold")
    return result


if __name__ == "__main__":
    asyncio.run(main(parser().parse_args()))
