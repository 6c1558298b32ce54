"""The same model in transformers, in float32: what the engine's numbers are held to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import models
import numpy as np
import torch
from transformers import AutoModelForCausalLM


class Reference:
    """A model computed by transformers."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @classmethod
    def of(cls, folder: Path, cfg: dict, tensors: dict[str, np.ndarray]) -> Reference:
        """Saved to a folder first."""
        return cls(models.save(folder, cfg, tensors))

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """log-softmax of every position's logits: [n, vocabulary]."""
        logits = self.model(torch.tensor([list(tokens)])).logits[0].double() / temperature
        return torch.log_softmax(logits, dim=-1).numpy()

    def of_response(self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Log-probability of each response token given what precedes it: [n]."""
        tokens = [*prompt, *response]
        table = self.logprobs(tokens, temperature)
        return np.array([table[i - 1, tokens[i]] for i in range(len(prompt), len(tokens))])

    @torch.no_grad()
    def routes(self, tokens: Sequence[int]) -> np.ndarray:
        """Experts of each token in each sparse layer, sorted: [n, layers, top_k]."""
        logits = self.model(torch.tensor([list(tokens)]), output_router_logits=True).router_logits
        biases = [value for name, value in self.model.named_buffers() if name.endswith("e_score_correction_bias")]
        if biases:
            logits = [layer.sigmoid() + bias for layer, bias in zip(logits, biases, strict=True)]
        top_k = self.model.config.num_experts_per_tok
        return np.stack([layer.topk(top_k, dim=-1).indices.sort(dim=-1).values.numpy() for layer in logits], axis=1)

    @torch.no_grad()
    def forced(self, tokens: Sequence[int], routes: np.ndarray) -> np.ndarray:
        """Log-probability of every token but the first when given experts run: [n - 1].

        Args:
            tokens: n tokens.
            routes: [n - 1, layers, top_k]; the last token, which has no row, routes itself.
        """
        routers = [one for name, one in self.model.named_modules() if type(one).__name__.lower().endswith("topkrouter")]
        for place, router in enumerate(routers):
            router.forward = _forced(router, torch.from_numpy(routes[:, place].astype(np.int64)))
        try:
            table = self.logprobs(tokens)
        finally:
            for router in routers:
                del router.forward
        return np.array([table[i - 1, tokens[i]] for i in range(1, len(tokens))])


def _forced(router, ids: torch.Tensor):
    """g_i = s_i / sum of s_j over the given experts, with s the exponential of the logits, or their sigmoid."""

    def forward(hidden):
        logits = torch.nn.functional.linear(hidden.reshape(-1, router.weight.shape[1]), router.weight)
        sigmoid = hasattr(router, "e_score_correction_bias")
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        own = (scores + router.e_score_correction_bias if sigmoid else scores)[len(ids) :].topk(router.top_k).indices
        chosen = torch.cat([ids, own])
        gates = scores.gather(1, chosen)
        gates = gates / gates.sum(-1, keepdim=True) * getattr(router, "routed_scaling_factor", 1.0)
        return logits, gates, chosen

    return forward
