"""What a lease asks for, made ready once for all of its rollouts."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import numpy as np

from vime_proto.buffer.v1 import buffer_pb2
from vime_proto.errors import ContractError
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_numpy
from vime_rollout.worker._deltas import INT32
from vime_rollout.worker._environment import Task
from vime_rollout.worker._errors import RolloutError
from vime_rollout.worker._sampling import check_sampling, overlay, request_seed
from vime_rollout.worker._tokenizer import Tokenizer

_ENVIRONMENT = -1


@dataclasses.dataclass
class Prepared:
    """A lease with its prompt rendered and its sampling parameters resolved.

    Attributes:
        lease: as the buffer gave it.
        ids: prompt ids, int32 [n].
        text: the prompt as rendered.
        messages: the prompt as chat messages; None when it is text or ids.
        sampling: worker's parameters, the prompt's over them, the evaluation's over those.
        seed: of the run.
        seeded: whether requests of training get seeds; those of evaluations always do.
    """

    lease: buffer_pb2.PromptLease
    ids: np.ndarray
    text: str
    messages: tuple[dict[str, Any], ...] | None
    sampling: pb.SamplingParams
    seed: int
    seeded: bool = True

    @property
    def evaluation(self) -> bool:
        """Whether the lease belongs to an evaluation."""
        return self.lease.purpose == buffer_pb2.LEASE_PURPOSE_EVALUATE

    def rollout_id(self, index: int) -> str:
        """Unique within the run, since the lease's id is."""
        return f"{self.lease.lease_id}:{index}"

    def seed_of(self, rollout: int, turn: int, part: int) -> int:
        """What the random numbers of one request follow from."""
        return request_seed(self.seed, self.lease.prompt.prompt_id, self.lease.attempt, rollout, turn, part)

    def sent_seed(self, rollout: int, turn: int, part: int) -> int | None:
        """The seed that the engine is told; None leaves it to the engine."""
        return self.seed_of(rollout, turn, part) if self.seeded or self.evaluation else None

    def task(self, index: int) -> Task:
        """What an environment is told."""
        prompt = self.lease.prompt
        return Task(
            prompt_id=prompt.prompt_id,
            messages=self.messages,
            text=prompt.text if prompt.WhichOneof("input") == "text" else None,
            answer=prompt.answer if prompt.HasField("answer") else None,
            record=json.loads(prompt.record_json) if prompt.record_json else {},
            rollout=index,
            seed=self.seed_of(index, _ENVIRONMENT, 0),
            evaluation=self.evaluation,
        )


class Preparer:
    """Renders prompts.

    Args:
        tokenizer: of the model; None refuses everything but token ids.
        sampling: the worker's parameters.
        seed: of the run.
        add_special_tokens: whether text prompts get the tokenizer's special tokens.
        vocab_size: ids must be below it; None skips that.
        max_model_len: a prompt must leave room for one token; None skips that.
        seeded: whether requests of training get seeds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: pb.SamplingParams,
        seed: int,
        add_special_tokens: bool = False,
        vocab_size: int | None = None,
        max_model_len: int | None = None,
        seeded: bool = True,
    ):
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._seed, self._seeded = seed, seeded
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._encode = functools.partial(tokenizer.encode, add_special_tokens=add_special_tokens)

    def __call__(self, lease: buffer_pb2.PromptLease) -> Prepared:
        """Makes a lease ready.

        Raises:
            RolloutError: a prompt or parameters that no attempt could use; stage "prompt", not retryable.
        """
        prompt = lease.prompt
        try:
            sampling = overlay(self._sampling, prompt.sampling, lease.sampling)
            check_sampling(sampling, evaluation=lease.purpose == buffer_pb2.LEASE_PURPOSE_EVALUATE)
            ids, text, messages = self._render(prompt)
        except ContractError as error:
            raise RolloutError("prompt", f"prompt {prompt.prompt_id!r}: {error}", False) from error
        return Prepared(lease, ids, text, messages, sampling, self._seed, self._seeded)

    def _render(self, prompt: pb.Prompt) -> tuple[np.ndarray, str, tuple[dict[str, Any], ...] | None]:
        kind = prompt.WhichOneof("input")
        if kind == "text":
            return self._checked(self._encode(prompt.text)), prompt.text, None
        if kind == "token_ids":
            ids = self._checked(to_numpy(prompt.token_ids, "prompt.token_ids", INT32, (None,)))
            return ids, self._tokenizer.decode([ids], skip_special_tokens=False)[0], None
        if kind is None:
            raise ContractError("prompt.input", "one of text, messages_json, token_ids must be set")
        try:
            messages = json.loads(prompt.messages_json)
        except json.JSONDecodeError as error:
            raise ContractError("prompt.messages_json", f"is not JSON: {error}") from error
        if not (isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages)):
            raise ContractError("prompt.messages_json", "must be a JSON array of messages")
        text = self._tokenizer.render(messages)
        return self._checked(self._tokenizer.encode(text)), text, tuple(messages)

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        if not len(ids):
            raise ContractError("prompt", "has no tokens")
        if self._vocab_size is not None and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise ContractError(
                "prompt", f"token ids must be in [0, {self._vocab_size}), got {ids.min()} to {ids.max()}"
            )
        if self._max_model_len is not None and len(ids) >= self._max_model_len:
            raise ContractError(
                "prompt", f"has {len(ids)} tokens, and the model takes {self._max_model_len} with the response"
            )
        return ids
