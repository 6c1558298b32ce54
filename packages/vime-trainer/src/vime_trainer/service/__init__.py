"""The trainer's two services: TrainerService and WeightService."""

from ._server import reachable_address, serve_trainer
from ._status import CheckpointRequest, RunStatus
from ._trainer import TrainerServicer
from ._weights import WeightServicer

__all__ = [
    "CheckpointRequest",
    "RunStatus",
    "TrainerServicer",
    "WeightServicer",
    "reachable_address",
    "serve_trainer",
]
