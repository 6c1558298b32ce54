"""One sample in the making: segments in order, exactly the tokens that were given and sampled."""

from __future__ import annotations

import numpy as np

from vime_proto.common.v1 import common_pb2
from vime_proto.routing.v1 import routing_pb2
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_rollout.worker._deltas import (
    FLOAT32,
    INT32,
    Deltas,
    check_finite,
    join_kept,
    join_top,
)


def _tensor(dtype: int, data: bytes) -> common_pb2.Tensor:
    return common_pb2.Tensor(dtype=dtype, shape=(len(data) // 4,), data=data)


class Trajectory:
    """Segments of one sample, from its prompt on.

    Args:
        prompt_ids: int32 [n], n >= 1.
    """

    def __init__(self, prompt_ids: np.ndarray):
        self._parts = [np.ascontiguousarray(prompt_ids, dtype="<i4").tobytes()]
        self.segments = [pb.Segment(role=pb.SEGMENT_ROLE_PROMPT, token_ids=_tensor(INT32, self._parts[0]))]
        self.routing: routing_pb2.RoutingTrace | None = None
        self.tokens = len(self._parts[0]) // 4

    @property
    def token_bytes(self) -> bytes:
        """All token ids, int32 little-endian."""
        if len(self._parts) > 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]

    @property
    def token_ids(self) -> np.ndarray:
        """All token ids: int32 [tokens]."""
        return np.frombuffer(self.token_bytes, dtype="<i4")

    @property
    def model_tokens(self) -> int:
        """Sampled tokens so far."""
        return sum(len(one.token_ids.data) // 4 for one in self.segments if one.role == pb.SEGMENT_ROLE_MODEL)

    @property
    def routes_version(self) -> common_pb2.PolicyVersion | None:
        """The weights that computed the last of its routes; None when there are none."""
        spans = self.routing.header.spans if self.routing is not None else ()
        return spans[-1].version if spans else None

    def add_given(self, role: int, ids: bytes) -> None:
        """Appends tokens that were not sampled (TOOL or TEMPLATE); nothing when there are none."""
        if ids:
            self.segments.append(pb.Segment(role=role, token_ids=_tensor(INT32, ids)))
            self._append(ids)

    def add_segments(self, segments) -> None:
        """Appends finished segments as they are (those of an earlier attempt)."""
        for segment in segments:
            self.segments.append(segment)
            self._append(segment.token_ids.data)

    def add_sampled(self, request: Deltas, sampling: pb.SamplingParams) -> int:
        """Appends what one request sampled: a MODEL segment for each policy version. Answers the number of tokens.

        A request that ended before its first token leaves one empty segment with its version, as long as the sample holds
        no other sampled text; a later segment takes its place.

        Raises:
            ContractError: a log-prob that is not finite, or per-token fields of another length.
        """
        first = not self.model_tokens
        for index, piece in enumerate(request.pieces):
            data, logprobs = b"".join(piece.ids), b"".join(piece.logprobs)
            self._drop_empty()
            if not data and any(one.role == pb.SEGMENT_ROLE_MODEL for one in self.segments):
                continue
            check_finite(logprobs, request.request_id)
            generation = pb.Generation(
                logprobs=_tensor(FLOAT32, logprobs),
                logprob_mode=pb.LOGPROB_MODE_PROCESSED,
                version=piece.version,
                sampling=sampling,
                engine_id=piece.engine_id,
                request_id=request.request_id,
            )
            if index == 0 and request.cached_tokens is not None:
                generation.cached_tokens = request.cached_tokens
            if index == len(request.pieces) - 1:
                # A stream that was cut from our side has no last message: what there is was aborted.
                generation.finish_reason = request.finish_reason or pb.FINISH_REASON_ABORT
                if request.stop_included is not None:
                    generation.stop_included = request.stop_included
            if piece.kept:
                generation.kept_token_ids.CopyFrom(join_kept(piece.kept, piece.tokens, request.request_id))
            if piece.top:
                generation.top_logprobs.CopyFrom(join_top(piece.top, piece.tokens, request.request_id))
            self.segments.append(
                pb.Segment(
                    role=pb.SEGMENT_ROLE_MODEL,
                    token_ids=_tensor(INT32, data),
                    trainable_all=True,
                    generation=generation,
                )
            )
            self._append(data)
        if request.routing is not None:
            self._add_routing(request.routing, first)
        return request.tokens

    def sample(self, sample_id: str) -> pb.Sample:
        """The sample so far; routes cover every token but the last, missing rows as holes."""
        sample = pb.Sample(sample_id=sample_id, segments=self.segments)
        if self.routing is not None:
            from vime_r3 import trace

            rows = self.tokens - 1
            have = self.routing.header.rows
            routing = self.routing
            if have < rows:
                routing = trace.pad(routing, rows)
            elif have > rows:
                routing = trace.truncate(routing, rows)
            sample.routing.CopyFrom(routing)
        return sample

    def _add_routing(self, routing: routing_pb2.RoutingTrace, first: bool) -> None:
        if self.routing is None:
            self.routing = routing
            return
        from vime_r3 import trace

        # Every request asks for all rows: the first ones win within a version, a newer version's replace them.
        self.routing = trace.extend(self.routing, routing)
        if first:
            # Nothing was sampled by the rows that were replaced: there is nothing that they would have replayed exactly. What
            # the engine itself says of its rows stands.
            del self.routing.header.inexact[:]
            self.routing.header.inexact.extend(routing.header.inexact)

    def _append(self, data: bytes) -> None:
        self._parts.append(data)
        self.tokens += len(data) // 4

    def _drop_empty(self) -> None:
        last = self.segments[-1]
        if last.role == pb.SEGMENT_ROLE_MODEL and not last.token_ids.data:
            self.segments.pop()
