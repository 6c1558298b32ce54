"""Requests of RouterService."""

from __future__ import annotations

import math

from vime_proto.channel import split_address
from vime_proto.errors import ContractError
from vime_proto.router.v1 import router_pb2 as pb
from vime_proto.validate import _fields as fields
from vime_proto.version import check_version


def validate_register_engine(request: pb.RegisterEngineRequest) -> None:
    """Checks ids, address and lease.

    Raises:
        ContractError: names the field.
    """
    fields.text(request.request_id, "request_id")
    fields.text(request.engine_id, "engine_id")
    fields.text(request.address, "address")
    if split_address(request.address)[1] == 0:
        raise ContractError("address", f"needs a port, got {request.address!r}")
    if request.HasField("lease_seconds") and not (math.isfinite(request.lease_seconds) and request.lease_seconds > 0):
        raise ContractError("lease_seconds", f"must be above 0, got {request.lease_seconds}")


def validate_engine_change(request: pb.DeregisterEngineRequest | pb.DrainEngineRequest) -> None:
    """Checks ids.

    Raises:
        ContractError: names the field.
    """
    fields.text(request.request_id, "request_id")
    fields.text(request.engine_id, "engine_id")


def validate_minimum_version(request: pb.SetMinimumVersionRequest) -> None:
    """Checks ids; a version, when set, must be whole.

    Raises:
        ContractError: names the field.
    """
    fields.text(request.request_id, "request_id")
    if request.HasField("version"):
        check_version(request.version, "version")
