"""The trainer's server."""

from __future__ import annotations

import socket

import vime_trainer
from vime_proto.channel import join_address, split_address
from vime_proto.server import RunningServer, ServerInfo, ServerOptions, start_server
from vime_proto.trainer.v1 import trainer_pb2_grpc
from vime_proto.weights.v1 import weights_pb2_grpc
from vime_trainer.publish import Publisher

from ._status import RunStatus
from ._trainer import TrainerServicer
from ._weights import WeightServicer

_ANYWHERE = ("0.0.0.0", "::")


async def serve_trainer(
    run_id: str, status: RunStatus, publisher: Publisher | None, options: ServerOptions
) -> RunningServer:
    """Serves TrainerService and, with a publisher, WeightService. Health is NOT_SERVING until the caller says otherwise."""
    services = [
        (
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server,
            TrainerServicer(status),
            "vime.trainer.v1.TrainerService",
        )
    ]
    if publisher is not None:
        services.append(
            (
                weights_pb2_grpc.add_WeightServiceServicer_to_server,
                WeightServicer(run_id, publisher),
                "vime.weights.v1.WeightService",
            )
        )
    info = ServerInfo("vime-trainer", "trainer", vime_trainer.__version__, run_id)
    return await start_server(services, info, options)


def reachable_address(address: str) -> str:
    """The address that others use: a wildcard host becomes this host's name."""
    host, port = split_address(address)
    return join_address(socket.gethostname(), port) if host in _ANYWHERE else address
