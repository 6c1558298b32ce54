from __future__ import annotations

import pytest

from vime_launch.probe import Incompatible, ask, check_contracts, check_run, parse_version
from vime_proto.buffer.v1 import buffer_pb2_grpc
from vime_proto.common.v1 import common_pb2
from vime_proto.fakes import FakeBuffer, serve


def info(low: str, high: str, package: str = "vime-x") -> common_pb2.GetInfoResponse:
    contract = common_pb2.ContractRange(minimum=low, maximum=high)
    return common_pb2.GetInfoResponse(contract=contract, package=package, package_version="0.1.0")


def test_versions_are_compared_as_numbers():
    assert parse_version("0.10") > parse_version("0.8")
    check_contracts({"router": info("1.8", "1.10"), "engine-0": info("1.9", "1.11")})
    with pytest.raises(Incompatible, match=r"router .* 1\.8 to 1\.10.*engine-0 .* 1\.11 to 2\.0"):
        check_contracts({"router": info("1.8", "1.10"), "engine-0": info("1.11", "2.0")})
    with pytest.raises(ValueError, match="MAJOR"):
        parse_version("1")


async def test_a_server_is_asked_what_it_is():
    async with serve(FakeBuffer()) as server:
        found = await ask(server.address, 10)
        check_run("buffer", found, "buffer", "any")
        with pytest.raises(Incompatible, match="no router"):
            check_run("router", found, "router", "any")
    assert buffer_pb2_grpc.BufferServiceStub is not None


def test_a_server_of_another_run_is_refused():
    found = info("1.0", "1.0")
    found.services.append("vime.buffer.v1.BufferService")
    found.run_id = "other"
    with pytest.raises(Incompatible, match="'other', this is run 'mine'"):
        check_run("buffer", found, "buffer", "mine")


async def test_nobody_there_is_said_within_the_time():
    with pytest.raises(TimeoutError, match="UNAVAILABLE"):
        await ask("127.0.0.1:9", 0.5)
