"""The servicer: every RPC of BufferService."""

from __future__ import annotations

from vime_buffer._service.blobs import BlobCalls
from vime_buffer._service.committing import CommitCalls
from vime_buffer._service.core import Core
from vime_buffer._service.evaluating import EvaluationCalls
from vime_buffer._service.grants import Grants
from vime_buffer._service.lending import LendingCalls
from vime_buffer._service.running import RunCalls
from vime_buffer._service.training import TrainingCalls
from vime_proto.buffer.v1.buffer_pb2_grpc import BufferServiceServicer


class BufferServicer(
    RunCalls, LendingCalls, CommitCalls, TrainingCalls, BlobCalls, EvaluationCalls, BufferServiceServicer
):
    """BufferService on a store.

    Args:
        core: database, files, source and hooks.
    """

    def __init__(self, core: Core):
        self.core = core
        self.grants = Grants(core)
