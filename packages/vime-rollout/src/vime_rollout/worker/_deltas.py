"""Collects the deltas of one Generate stream into pieces of one policy version each."""

from __future__ import annotations

import dataclasses

import numpy as np

from vime_proto.common.v1 import common_pb2
from vime_proto.errors import ContractError
from vime_proto.rollout.v1 import rollout_pb2
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_numpy, to_tensor

INT32, FLOAT32 = common_pb2.DTYPE_INT32, common_pb2.DTYPE_FLOAT32


@dataclasses.dataclass
class Piece:
    """Tokens that one set of weights produced in one request; byte strings are little-endian and concatenated as they came."""

    version: common_pb2.PolicyVersion
    engine_id: str = ""
    ids: list[bytes] = dataclasses.field(default_factory=list)
    logprobs: list[bytes] = dataclasses.field(default_factory=list)
    tokens: int = 0
    kept: list[pb.RaggedTensor] = dataclasses.field(default_factory=list)
    top: list[pb.TopLogprobs] = dataclasses.field(default_factory=list)


class Deltas:
    """The answer to one request as it arrives. Each message holds only what is new.

    Args:
        request_id: the request, for messages.
    """

    def __init__(self, request_id: str):
        self.request_id = request_id
        self.pieces: list[Piece] = []
        self.finish_reason = pb.FINISH_REASON_UNSPECIFIED
        self.stop_included: bool | None = None
        self.cached_tokens: int | None = None
        self.routing = None
        self.tokens = 0

    def add(self, delta: rollout_pb2.GenerateResponse) -> None:
        """Takes one message in.

        Raises:
            ContractError: ids and log-probs of different length or type, or no version.
        """
        if delta.version.run_id:
            piece = self._piece(delta)
            if delta.HasField("token_ids"):
                self._tokens(piece, delta)
        elif delta.HasField("token_ids") or delta.finish_reason != pb.FINISH_REASON_ABORT:
            # Only a router that ends a request before any engine saw it has no version to state.
            raise ContractError("version", f"request {self.request_id!r}: the engine stated no version")
        if delta.HasField("cached_tokens") and self.cached_tokens is None:
            self.cached_tokens = delta.cached_tokens
        if delta.finish_reason:
            self.finish_reason = delta.finish_reason
            if delta.HasField("stop_included"):
                self.stop_included = delta.stop_included
            if delta.HasField("routing"):
                self.routing = delta.routing

    def _piece(self, delta: rollout_pb2.GenerateResponse) -> Piece:
        last = self.pieces[-1] if self.pieces else None
        if last is not None and last.version == delta.version:
            return last
        if last is not None and not delta.HasField("token_ids"):
            # News of another version without tokens of it: nothing was produced by it.
            return last
        piece = Piece(delta.version, delta.engine_id)
        if last is not None and last.tokens == 0:
            self.pieces[-1] = piece
        else:
            self.pieces.append(piece)
        return piece

    def _tokens(self, piece: Piece, delta: rollout_pb2.GenerateResponse) -> None:
        ids, logprobs = delta.token_ids, delta.logprobs
        if ids.dtype != INT32 or logprobs.dtype != FLOAT32:
            raise ContractError("token_ids", f"request {self.request_id!r}: ids must be INT32 and log-probs FLOAT32")
        count, rest = divmod(len(ids.data), 4)
        if rest or len(logprobs.data) != len(ids.data) or list(ids.shape) != [count] or list(logprobs.shape) != [count]:
            raise ContractError(
                "logprobs",
                f"request {self.request_id!r}: {list(ids.shape)} ids ({len(ids.data)} bytes) and {list(logprobs.shape)} "
                f"log-probs ({len(logprobs.data)} bytes) do not fit",
            )
        piece.ids.append(ids.data)
        piece.logprobs.append(logprobs.data)
        piece.tokens += count
        self.tokens += count
        if delta.HasField("kept_token_ids"):
            piece.kept.append(delta.kept_token_ids)
        if delta.HasField("top_logprobs"):
            piece.top.append(delta.top_logprobs)


def check_finite(logprobs: bytes, request_id: str) -> None:
    """Checks log-probs at the boundary.

    Raises:
        ContractError: NaN or infinite; names the position.
    """
    values = np.frombuffer(logprobs, dtype="<f4")
    good = np.isfinite(values)
    if not good.all():
        where = int(np.argmin(good))
        raise ContractError(
            "logprobs", f"request {request_id!r}: token {where} of {len(values)} has log-prob {values[where]}"
        )


def join_kept(parts: list[pb.RaggedTensor], tokens: int, request_id: str) -> pb.RaggedTensor:
    """Kept sets of consecutive deltas as one.

    Raises:
        ContractError: not one row for each token.
    """
    values = [to_numpy(part.values, "kept_token_ids.values", INT32) for part in parts]
    counts = [
        np.diff(to_numpy(part.offsets, "kept_token_ids.offsets", common_pb2.DTYPE_UINT64).astype(np.int64))
        for part in parts
    ]
    sizes = np.concatenate(counts)
    if len(sizes) != tokens:
        raise ContractError("kept_token_ids", f"request {request_id!r}: {len(sizes)} rows for {tokens} tokens")
    offsets = np.zeros(tokens + 1, dtype=np.uint64)
    np.cumsum(sizes, out=offsets[1:])
    return pb.RaggedTensor(values=to_tensor(np.concatenate(values)), offsets=to_tensor(offsets))


def join_top(parts: list[pb.TopLogprobs], tokens: int, request_id: str) -> pb.TopLogprobs:
    """Alternatives of consecutive deltas as one.

    Raises:
        ContractError: not one row for each token.
    """
    ids = np.concatenate([to_numpy(part.token_ids, "top_logprobs.token_ids", INT32) for part in parts])
    logprobs = np.concatenate([to_numpy(part.logprobs, "top_logprobs.logprobs", FLOAT32) for part in parts])
    if len(ids) != tokens or ids.shape != logprobs.shape:
        raise ContractError("top_logprobs", f"request {request_id!r}: {ids.shape} ids for {tokens} tokens")
    return pb.TopLogprobs(token_ids=to_tensor(ids), logprobs=to_tensor(logprobs))
