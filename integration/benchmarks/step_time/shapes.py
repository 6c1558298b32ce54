"""The job: a model's sizes, how much is generated, and the files that both sides read."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Ids 0 and 1 of the tokenizer; every other id is a word of its own, so that any sequence of ids has a text.
SPECIAL = ("<pad>", "<eos>")


@dataclass(frozen=True)
class Job:
    """One step: ``groups`` prompts of ``prompt_tokens``, each answered ``group_size`` times with exactly ``new_tokens``.

    Attributes:
        sizes: entries of config.json.
        token_budget: tokens of a micro-batch of the trainer.
        micro_batch: sequences of a micro-batch of the peer, about as many tokens.
    """

    groups: int
    group_size: int
    prompt_tokens: int
    new_tokens: int
    sizes: dict[str, Any]
    token_budget: int
    micro_batch: int

    @property
    def rollouts(self) -> int:
        return self.groups * self.group_size

    @property
    def generated(self) -> int:
        """Tokens that a step generates."""
        return self.rollouts * self.new_tokens

    @property
    def model_len(self) -> int:
        """Most tokens of a sequence, with a little room."""
        return self.prompt_tokens + self.new_tokens + 16


def _sizes(vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 8192,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


FULL = Job(32, 8, 100, 512, _sizes(151936, 1024, 3072, 28, 16, 8, 128), token_budget=32768, micro_batch=32)
"""Sizes of Qwen3-0.6B."""
TINY = Job(4, 4, 20, 24, _sizes(512, 64, 96, 2, 4, 2, 32), token_budget=512, micro_batch=8)
"""A few seconds a run on a CPU: shows that everything works, not how fast."""


def write_inputs(job: Job, folder: Path, rows: int = 2048) -> None:
    """Writes ``config/`` (config.json and a tokenizer of words) and ``prompts.jsonl`` with random words."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    config = folder / "config"
    config.mkdir(parents=True, exist_ok=True)
    vocab = job.sizes["vocab_size"]
    words = {text: index for index, text in enumerate((*SPECIAL, *(f"w{n}" for n in range(len(SPECIAL), vocab))))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(config / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    (config / "tokenizer_config.json").write_text(json.dumps(about))
    (config / "config.json").write_text(json.dumps(job.sizes, indent=1))
    draw = random.Random(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(rows):
            ids = (draw.randrange(len(SPECIAL), vocab) for _ in range(job.prompt_tokens))
            file.write(json.dumps({"prompt": " ".join(f"w{n}" for n in ids)}) + "\n")
