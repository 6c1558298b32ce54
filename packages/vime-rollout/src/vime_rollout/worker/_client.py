"""Generation through RolloutService: retries under the same id, continuation after an abort."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

import grpc
import grpc.aio

from vime_proto import metadata
from vime_proto.channel import retry_delay
from vime_proto.common.v1 import common_pb2
from vime_proto.errors import ContractError, describe
from vime_proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.version import satisfies, show
from vime_rollout.worker._deltas import INT32, Deltas
from vime_rollout.worker._errors import RolloutError
from vime_rollout.worker._trajectory import Trajectory

_EMPTY_SECONDS, _MOST_EMPTY_SECONDS = 0.05, 2.0
_PRECONDITION_SECONDS = 120.0
_MOST_EMPTY_ABORTS = 200


@dataclasses.dataclass(frozen=True)
class TurnRequest:
    """How one model turn is generated.

    Attributes:
        key: unique prefix of its request ids within the run.
        sampling: parameters; max_new_tokens is the budget of the whole turn.
        seed: seed of the n-th request of the turn; None leaves its random numbers to the engine.
        session_id: groups the turns of a rollout.
        minimum_version: the oldest weights that may answer; None for any.
        routing: whether expert routes are wanted.
        generated: tokens of this turn that an earlier attempt left.
    """

    key: str
    sampling: pb.SamplingParams
    seed: Callable[[int], int | None]
    session_id: str = ""
    minimum_version: common_pb2.PolicyVersion | None = None
    routing: bool = False
    generated: int = 0


class Generator:
    """Generates turns at a router or an engine.

    Args:
        channel: to the router or engine.
        max_model_len: most tokens of prompt and response together; None when unknown.
        retry_seconds: how long engines may be unavailable before a turn fails.
    """

    def __init__(self, channel: grpc.aio.Channel, max_model_len: int | None = None, retry_seconds: float = 600.0):
        self._stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        self._max_model_len = max_model_len
        self._retry_seconds = retry_seconds
        self.retries = 0
        self.continuations = 0

    async def turn(self, trajectory: Trajectory, turn: TurnRequest) -> int:
        """Samples one turn onto the trajectory; a turn that is aborted goes on as a new prompt with what is left of its budget.

        A caller that cancels finds on the trajectory what had arrived. Answers the finish reason.

        Raises:
            RolloutError: refused, unavailable for too long, or an answer that breaks the contract.
        """
        done, empty = turn.generated, 0
        part = 0
        while True:
            budget = turn.sampling.max_new_tokens - done
            if self._max_model_len is not None:
                budget = min(budget, self._max_model_len - trajectory.tokens)
            if budget <= 0:
                return pb.FINISH_REASON_LENGTH
            sampling = pb.SamplingParams()
            sampling.CopyFrom(turn.sampling)
            sampling.max_new_tokens = budget
            # A seed that came with the parameters would be that of all rollouts of the group.
            sampling.ClearField("seed")
            if (seed := turn.seed(part)) is not None:
                sampling.seed = seed
            if sampling.min_new_tokens:
                sampling.min_new_tokens = min(max(0, sampling.min_new_tokens - done), budget)
            request = rollout_pb2.GenerateRequest(
                request_id=f"{turn.key}.{part}",
                prompt_token_ids=common_pb2.Tensor(
                    dtype=INT32, shape=(trajectory.tokens,), data=trajectory.token_bytes
                ),
                sampling=sampling,
                return_routing=turn.routing,
                session_id=turn.session_id,
                minimum_version=_minimum(turn, trajectory),
            )
            finish = await self._into(trajectory, request)
            if finish.finish_reason != pb.FINISH_REASON_ABORT:
                return finish.finish_reason
            done += finish.tokens
            part += 1
            self.continuations += 1
            empty = 0 if finish.tokens else empty + 1
            if empty >= _MOST_EMPTY_ABORTS:
                raise RolloutError(
                    "generate", f"request {request.request_id!r} was aborted {empty} times without a token", True
                )
            if empty:
                await asyncio.sleep(min(_MOST_EMPTY_SECONDS, _EMPTY_SECONDS * empty))

    async def _into(self, trajectory: Trajectory, request: rollout_pb2.GenerateRequest) -> Deltas:
        deltas = [Deltas(request.request_id)]
        try:
            await self._stream(request, deltas)
        except asyncio.CancelledError:
            if deltas[0].pieces:
                trajectory.add_sampled(deltas[0], request.sampling)
            raise
        except ContractError as error:
            raise RolloutError("generate", str(error), False) from error
        try:
            trajectory.add_sampled(deltas[0], request.sampling)
        except ContractError as error:
            raise RolloutError("generate", str(error), False) from error
        return deltas[0]

    async def _stream(self, request: rollout_pb2.GenerateRequest, deltas: list[Deltas]) -> None:
        """Fills ``deltas[0]``; a repeated request starts over, since an id replays from its first token."""
        call_metadata = _metadata(request)
        end = time.monotonic() + self._retry_seconds
        precondition_end = None
        attempt = 0
        while True:
            call = self._stub.Generate(request, metadata=call_metadata)
            try:
                while (delta := await call.read()) is not grpc.aio.EOF:
                    deltas[0].add(delta)
                # Read to the end: a call that is cancelled after its last message looks like one that was abandoned.
                if deltas[0].finish_reason:
                    return
                raise RolloutError("generate", f"request {request.request_id!r} ended without a finish reason", True)
            except grpc.aio.AioRpcError as error:
                if deltas[0].finish_reason:
                    return
                code, limit = error.code(), end
                also = {grpc.StatusCode.ABORTED}
                if code is grpc.StatusCode.FAILED_PRECONDITION and request.HasField("minimum_version"):
                    # Engines may still be on their way to the version.
                    also.add(code)
                    precondition_end = precondition_end or time.monotonic() + _PRECONDITION_SECONDS
                    limit = min(end, precondition_end)
                delay = retry_delay(error, attempt, also)
                if delay is None or time.monotonic() + delay >= limit:
                    final = code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
                    raise RolloutError(
                        "generate", f"request {request.request_id!r}: {describe(error)}", not final
                    ) from error
                attempt += 1
                self.retries += 1
                deltas[0] = Deltas(request.request_id)
                await asyncio.sleep(delay)
            finally:
                call.cancel()


def _minimum(turn: TurnRequest, trajectory: Trajectory) -> common_pb2.PolicyVersion | None:
    """The oldest weights that may go on. While engines change to new weights one after the other, routes must not go back."""
    lowest, reached = turn.minimum_version, trajectory.routes_version
    if reached is None or (lowest is not None and not satisfies(reached, lowest)):
        return lowest
    return reached


def _metadata(request: rollout_pb2.GenerateRequest) -> tuple[tuple[str, str], ...]:
    tokens = request.prompt_token_ids.shape[0] + request.sampling.max_new_tokens
    pairs = [(metadata.REQUEST_ID, request.request_id), (metadata.ESTIMATED_TOKENS, str(tokens))]
    if request.session_id:
        pairs.append((metadata.SESSION, request.session_id))
    if request.HasField("minimum_version"):
        pairs.append((metadata.MINIMUM_VERSION, show(request.minimum_version)))
    return tuple(pairs)
