"""Draws tokens as SamplingParams say."""

from __future__ import annotations

import numpy as np

from vime_proto.fakes._toy_model import EOS, log_softmax
from vime_proto.sample.v1 import sample_pb2
from vime_proto.validate import truncates


class Sampler:
    """One request's sampling.

    Args:
        params: the request's parameters.
        seed: used when they state none.
    """

    def __init__(self, params: sample_pb2.SamplingParams, seed: int):
        self._params = params
        self._rng = np.random.default_rng(params.seed if params.HasField("seed") else seed)
        self._temperature = params.temperature if params.HasField("temperature") else 1.0
        self._count = 0

    def draw(self, logits: np.ndarray, raw: bool) -> tuple[int, np.ndarray, np.ndarray | None]:
        """(token, log-probs over the vocabulary in the mode asked for, kept ids when truncation is on)."""
        banned = np.zeros(len(logits))
        if self._count < self._params.min_new_tokens:
            banned[[EOS, *self._params.stop_token_ids]] = -np.inf
        self._count += 1
        plain = log_softmax(logits)
        if self._temperature == 0:
            return int(np.argmax(logits + banned)), plain, None
        scaled = log_softmax(logits / self._temperature + banned)
        kept = self._kept(scaled) if truncates(self._params) else None
        if kept is not None:
            mask = np.full(len(logits), -np.inf)
            mask[kept] = 0
            scaled = log_softmax(scaled + mask)
        token = int(self._rng.choice(len(scaled), p=np.exp(scaled) / np.exp(scaled).sum()))
        return token, plain if raw else scaled, kept

    def _kept(self, scaled: np.ndarray) -> np.ndarray:
        order = np.argsort(-scaled, kind="stable")
        probs = np.exp(scaled[order])
        keep = np.ones(len(order), bool)
        if self._params.top_k:
            keep[self._params.top_k :] = False
        if self._params.HasField("top_p"):
            keep &= np.cumsum(probs) - probs < self._params.top_p
        keep &= probs >= self._params.min_p * probs[0]
        return np.sort(order[keep]).astype(np.int32)

    def stop(self, token: int) -> bool:
        """Whether this token ends the generation."""
        return (token == EOS and not self._params.ignore_eos) or token in self._params.stop_token_ids
