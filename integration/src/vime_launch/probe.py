"""Asks a server what it is, and whether it can take part in the run."""

from __future__ import annotations

from collections.abc import Mapping

from vime_proto.channel import call, open_channel, wait_serving
from vime_proto.common.v1 import common_pb2, common_pb2_grpc

Version = tuple[int, int]


class Incompatible(RuntimeError):
    """Two stages share no contract version, or a server plays another role than the recipe says."""


def parse_version(text: str) -> Version:
    """``(1, 10)`` for ``"1.10"``, so that 1.10 is newer than 1.8.

    Raises:
        ValueError: not MAJOR.MINOR.
    """
    major, dot, minor = text.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise ValueError(f"{text!r} is not a contract version MAJOR.MINOR")
    return int(major), int(minor)


def _range(info: common_pb2.GetInfoResponse) -> tuple[Version, Version]:
    return parse_version(info.contract.minimum), parse_version(info.contract.maximum)


def check_contracts(infos: Mapping[str, common_pb2.GetInfoResponse]) -> None:
    """Checks that every pair of stages shares a contract version.

    Raises:
        Incompatible: a pair that shares none; the text names both and their ranges.
    """
    names = list(infos)
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            (low, high), (other_low, other_high) = _range(infos[one]), _range(infos[other])
            if max(low, other_low) > min(high, other_high):
                a, b = infos[one], infos[other]
                raise Incompatible(
                    f"{one} ({a.package} {a.package_version}) speaks contract {a.contract.minimum} to {a.contract.maximum}, "
                    f"{other} ({b.package} {b.package_version}) speaks {b.contract.minimum} to {b.contract.maximum}: "
                    "they share no version"
                )


def check_run(name: str, info: common_pb2.GetInfoResponse, kind: str, run_id: str) -> None:
    """Checks that a server offers what the recipe expects of it.

    Raises:
        Incompatible: it lacks the stage's service, or works for another run.
    """
    service = {
        "buffer": "vime.buffer.v1.BufferService",
        "router": "vime.router.v1.RouterService",
        "engine": "vime.rollout.v1.RolloutService",
        "trainer": "vime.trainer.v1.TrainerService",
    }[kind]
    if service not in info.services:
        offered = ", ".join(info.services) or "nothing"
        raise Incompatible(f"{name} does not offer {service}, so it is no {kind}; it offers {offered}")
    if info.run_id and info.run_id != run_id:
        raise Incompatible(f"{name} works for run {info.run_id!r}, this is run {run_id!r}")


async def ask(address: str, seconds: float) -> common_pb2.GetInfoResponse:
    """Waits until the server at ``address`` serves, and answers what it is.

    Raises:
        TimeoutError: it does not serve within ``seconds``.
        grpc.RpcError: it serves but has no InfoService.
    """
    async with open_channel(address) as channel:
        await wait_serving(channel, seconds)
        info = common_pb2_grpc.InfoServiceStub(channel)
        return await call(info.GetInfo, common_pb2.GetInfoRequest(), timeout=10, deadline=30)
