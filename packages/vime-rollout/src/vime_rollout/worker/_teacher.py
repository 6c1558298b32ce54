"""Log-probabilities of sampled tokens under a teacher, for distillation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio
import numpy as np

from vime_proto import metadata
from vime_proto.channel import call
from vime_proto.common.v1 import common_pb2
from vime_proto.errors import ContractError, describe
from vime_proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_numpy, to_tensor
from vime_rollout.worker._deltas import FLOAT32, INT32
from vime_rollout.worker._errors import FatalError, RolloutError
from vime_rollout.worker._trajectory import Trajectory

_CALL_SECONDS = 300.0
_FINAL = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
)


class Teacher:
    """Scores samples at a RolloutService.

    Args:
        channel: to the teacher's engine or router.
        temperature: divides the teacher's logits; above 0, and stated in every request.
        retry_seconds: how long the teacher may be unavailable before a rollout fails.
    """

    def __init__(self, channel: grpc.aio.Channel, temperature: float, retry_seconds: float = 600.0):
        self._stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        self._temperature = temperature
        self._retry_seconds = retry_seconds

    async def check(self, vocab_size: int, seconds: float) -> None:
        """Waits for the teacher, and compares its vocabulary with the policy's (0: unknown).

        Raises:
            FatalError: it does not answer within ``seconds``, or has another vocabulary.
        """
        try:
            info = await call(
                self._stub.GetModelInfo, rollout_pb2.GetModelInfoRequest(), timeout=30.0, deadline=seconds
            )
        except grpc.aio.AioRpcError as error:
            raise FatalError(f"teacher: no model: {describe(error)}") from error
        if vocab_size and info.vocab_size and info.vocab_size != vocab_size:
            raise FatalError(
                f"teacher: {info.model or 'the model'} has a vocabulary of {info.vocab_size}, the policy one of {vocab_size}"
            )

    async def score(self, trajectories: Sequence[Trajectory], rollout_id: str) -> None:
        """Writes ``generation.teacher_logprobs`` (float32, a number a token, in nats) into every MODEL segment.

        Raises:
            RolloutError: refused, unavailable for too long, or an answer that breaks the contract.
        """
        work = (self._one(one, f"{rollout_id}:teacher:{number}") for number, one in enumerate(trajectories))
        await asyncio.gather(*work)

    async def _one(self, trajectory: Trajectory, request_id: str) -> None:
        spans, offset = [], 0
        for segment in trajectory.segments:
            length = len(segment.token_ids.data) // 4
            if segment.role == pb.SEGMENT_ROLE_MODEL and length:
                spans.append((segment, offset, offset + length))
            offset += length
        if not spans:
            return
        start = spans[0][1]
        values = await self._ask(trajectory, start, request_id)
        for segment, first, last in spans:
            segment.generation.teacher_logprobs.CopyFrom(to_tensor(values[first - start : last - start]))

    async def _ask(self, trajectory: Trajectory, start: int, request_id: str) -> np.ndarray:
        count = trajectory.tokens
        request = rollout_pb2.ScoreRequest(
            request_id=request_id,
            token_ids=common_pb2.Tensor(dtype=INT32, shape=(count,), data=trajectory.token_bytes),
            start=start,
            temperature=self._temperature,
        )
        pairs = ((metadata.REQUEST_ID, request_id), (metadata.ESTIMATED_TOKENS, str(count)))
        try:
            answer = await call(
                self._stub.Score, request, timeout=_CALL_SECONDS, deadline=self._retry_seconds, metadata=pairs
            )
            values = to_numpy(answer.logprobs, "logprobs", FLOAT32, (count - start,))
        except grpc.aio.AioRpcError as error:
            final = error.code() in _FINAL
            raise RolloutError("teacher", f"request {request_id!r}: {describe(error)}", not final) from error
        except ContractError as error:
            raise RolloutError("teacher", f"request {request_id!r}: {error}", False) from error
        if not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values))[0])
            message = f"request {request_id!r}: the log-prob of token {start + bad} is {values[bad]}"
            raise RolloutError("teacher", message, True)
        return values
