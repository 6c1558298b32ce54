"""Whether the stages that this trainer talks to speak its contract."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

import vime_proto
from vime_proto.channel import call, open_channel
from vime_proto.common.v1 import common_pb2, common_pb2_grpc
from vime_proto.errors import ContractError, describe

log = logging.getLogger(__name__)


async def check_peer(
    role: str,
    address: str,
    run_id: str,
    wait_seconds: float,
    open_channel: Callable[[str], grpc.aio.Channel] = open_channel,
) -> None:
    """Asks a stage what it is.

    Args:
        role: "buffer" or "router"; the configuration key of its address, for errors.
        address: host:port.
        run_id: the run; a stage that serves another one is refused.
        wait_seconds: for which a stage that is not up yet is tried.
        open_channel: makes a channel to an address.

    Raises:
        ContractError: no contract version in common, or another run.
        grpc.RpcError: it cannot be reached.
    """
    async with open_channel(address) as channel:
        method = common_pb2_grpc.InfoServiceStub(channel).GetInfo
        try:
            info = await call(method, common_pb2.GetInfoRequest(), timeout=10.0, deadline=10.0 + wait_seconds)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                # The error that ends the run does not say whose it is.
                log.error("%s at %s: %s", role, address, describe(error))
                raise
            log.warning("%s at %s does not say what it is", role, address)
            return
    ours = (vime_proto.CONTRACT_MINIMUM, vime_proto.CONTRACT_MAXIMUM)
    theirs = (info.contract.minimum, info.contract.maximum)
    if _key(theirs[1]) < _key(ours[0]) or _key(ours[1]) < _key(theirs[0]):
        raise ContractError(
            role,
            f"{info.package} {info.package_version} at {address} speaks contract {theirs[0]} to {theirs[1]}, this trainer "
            f"{ours[0]} to {ours[1]}: none in common",
        )
    if info.run_id and info.run_id != run_id:
        raise ContractError(role, f"{info.package} at {address} serves run {info.run_id!r}, not {run_id!r}")


def _key(version: str) -> tuple[int, ...]:
    # Numbers, not texts: 1.10 comes after 1.9.
    return tuple(int(part) for part in version.split(".") if part.isdigit())
