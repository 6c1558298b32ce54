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
