"""A client of RolloutService that the rollout, router and engine suites share."""

from __future__ import annotations

import dataclasses
import functools
import time

import grpc
import numpy as np
import pytest

from vime_proto import metadata
from vime_proto.conformance._calls import new_id
from vime_proto.fakes import build
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.rollout.v1 import rollout_pb2_grpc
from vime_proto.sample.v1 import sample_pb2
from vime_proto.tensor import to_numpy
from vime_proto.validate import validate_generate_response
from vime_proto.version import show

CANNOT = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)


@dataclasses.dataclass
class Answer:
    """A whole answer: the messages, and what they add up to."""

    messages: list[pb.GenerateResponse]

    @property
    def tokens(self) -> list[int]:
        return [int(t) for m in self.messages if m.HasField("token_ids") for t in to_numpy(m.token_ids)]

    @property
    def logprobs(self) -> np.ndarray:
        parts = [to_numpy(m.logprobs) for m in self.messages if m.HasField("logprobs")]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    @property
    def last(self) -> pb.GenerateResponse:
        return self.messages[-1]

    def check(self, request: pb.GenerateRequest) -> None:
        """What holds for every answer."""
        assert self.messages, "an answer has at least its last message"
        for message in self.messages:
            assert message.request_id == request.request_id
            validate_generate_response(message, request.top_logprobs)
        assert self.last.finish_reason, "the last message states why it ended"
        assert not any(message.finish_reason for message in self.messages[:-1])
        assert len(self.tokens) == len(self.logprobs) <= request.sampling.max_new_tokens


def call_metadata(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    """What a router may read of a request without decoding it."""
    tokens = sum(request.prompt_token_ids.shape[:1]) + request.sampling.max_new_tokens
    pairs = [
        (metadata.REQUEST_ID, request.request_id),
        (metadata.ESTIMATED_TOKENS, str(tokens)),
        (metadata.SESSION, request.session_id),
    ]
    if request.minimum_version.HasField("number"):
        pairs.append((metadata.MINIMUM_VERSION, show(request.minimum_version)))
    return [(key, value) for key, value in pairs if value]


class RolloutClient:
    """Calls RolloutService of the server under test."""

    def __init__(self, target):
        self.stub = rollout_pb2_grpc.RolloutServiceStub(target.channel)
        self.timeout = target.timeout
        self.info = self.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=target.timeout)
        self.capabilities = dict(target.info().capabilities)
        self.services = set(target.info().services)

    def prompt(self, length: int = 4, shift: int = 0) -> list[int]:
        """Ids below the vocabulary that end no response."""
        allowed = [i for i in range(min(self.info.vocab_size, 200)) if i not in self.info.eos_token_ids]
        return [allowed[(7 * i + shift) % len(allowed)] for i in range(length)]

    def request(self, prompt: list[int] | None = None, **fields) -> pb.GenerateRequest:
        """Temperature 1, 5 tokens, unless stated; names of SamplingParams go there."""
        names = build.sampling().DESCRIPTOR.fields_by_name
        sampling = {name: fields.pop(name) for name in list(fields) if name in names}
        return pb.GenerateRequest(
            request_id=fields.pop("request_id", None) or new_id("generate"),
            prompt_token_ids=build.ids(prompt if prompt is not None else self.prompt()),
            sampling=build.sampling(**{"max_new_tokens": 5, **sampling}),
            **fields,
        )

    def long_request(self, **fields) -> pb.GenerateRequest:
        """As many tokens as the engine takes."""
        room = min(self.info.max_model_len - 8, 2000)
        return self.request(max_new_tokens=room, ignore_eos=True, **fields)

    @functools.cached_property
    def long_seconds(self) -> float:
        """How long a long request takes when nobody ends it."""
        began = time.monotonic()
        self.generate(self.long_request())
        return time.monotonic() - began

    def ended_early(self, answer: Answer, seconds: float) -> None:
        """The answer must have been cut short; skips when the request may have been over before anybody asked.

        Args:
            answer: to a long request.
            seconds: from its start to the moment before the call that should end it.
        """
        if answer.last.finish_reason == sample_pb2.FINISH_REASON_ABORT:
            return
        if seconds > self.long_seconds / 3:
            pytest.skip("the target answers a long request too fast for this test")
        assert answer.last.finish_reason == sample_pb2.FINISH_REASON_ABORT, "the request ran on to its end"

    def start(self, request: pb.GenerateRequest):
        """The open stream."""
        return self.stub.Generate(request, timeout=self.timeout, metadata=call_metadata(request))

    def generate(self, request: pb.GenerateRequest | None = None, **fields) -> Answer:
        """A whole, checked answer."""
        request = request if request is not None else self.request(**fields)
        answer = Answer(list(self.start(request)))
        answer.check(request)
        return answer

    def or_skip(self, what: str, call):
        """The call's result; skips when the server says that it cannot."""
        try:
            return call()
        except grpc.RpcError as error:
            if error.code() in CANNOT:
                pytest.skip(f"the target cannot: {what} ({error.code().name}: {error.details()})")
            raise

    def score(self, tokens: list[int], **fields) -> pb.ScoreResponse:
        request = pb.ScoreRequest(
            **{"request_id": new_id("score"), "token_ids": build.ids(tokens), "temperature": 1.0, **fields}
        )
        return self.stub.Score(request, timeout=self.timeout)
