"""What the services and the backend hand one another. Plain Python: no torch, no vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import grpc
import numpy as np

from vime_proto.errors import StatusError


class BackendDeadError(RuntimeError):
    """The inference processes are gone; nothing more will be answered."""


class NotFiniteError(StatusError):
    """A log-probability is NaN or infinite: INTERNAL. It is never replaced by a number."""

    def __init__(self, message: str):
        super().__init__(grpc.StatusCode.INTERNAL, message)


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How one request is sampled; every value explicit."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    top_logprobs: int = 0
    # Alternatives at each prompt position; None computes nothing for the prompt, -1 the whole vocabulary.
    prompt_logprobs: int | None = None


@dataclasses.dataclass(slots=True)
class Output:
    """New output of one request.

    Attributes:
        tokens: new ids.
        logprobs: their log-probabilities, in nats.
        top: alternatives of each new token, most likely first, as (id, log-probability).
        cached_tokens: prompt tokens served from the prefix cache.
        finish: "stop", "length", "abort" or "error" in the last output, else None.
        stop_token: the stop token id that ended it.
        routes: in the last output, ids ``[rows, layers, top_k]`` of all decoder layers; None when nothing was captured.
        prompt_logprobs: in the first output, when asked for: ids int32 and log-probabilities float64, both [n - 1, k + 1], of every
            prompt token but the first: the token itself, then the k most likely ones (or the vocabulary in its own order).
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[Sequence[tuple[int, float]]] | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    stop_token: int | None = None
    routes: np.ndarray | None = None
    prompt_logprobs: tuple[np.ndarray, np.ndarray] | None = None


# Called on the event loop, at once and in order, by the backend: with output, or with the error that ends the request.
Sink = Callable[[Output | Exception], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or a box of one, within a chunk.

    Attributes:
        name: Hugging Face name.
        dtype: torch's name of the element type.
        shape: of the whole tensor.
        start, extent: the box; empty when the piece is the whole tensor.
        offset: of the piece's first byte within the chunk; negative when it began in an earlier chunk.
        length: bytes of the piece.
        pieces: number of pieces of the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    offset: int
    length: int
    pieces: int
