"""Two-digit addition as text, a tokenizer for it, and a model to learn it.

``<bos>47+85=`` is answered by ``132<eos>``: operands with two digits, answers with three. A fifth of the operand pairs
(in either order) is held out of everything that trains.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "0123456789+-*= "
VOCABULARY = 32
# How often the warm-up's teacher forgets every carry of a sum.
SLOPPINESS = 0.57
HELD_OUT_SHARE = 5


@dataclass(frozen=True)
class Addition:
    """One sum."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"<bos>{self.a:02d}+{self.b:02d}="

    @property
    def answer(self) -> str:
        return f"{self.a + self.b:03d}"

    @property
    def without_carries(self) -> str:
        """The answer of somebody who forgets every carry: 47+85 is 022."""
        return f"0{(self.a // 10 + self.b // 10) % 10}{(self.a % 10 + self.b % 10) % 10}"

    @property
    def held_out(self) -> bool:
        """Decided by the pair, whatever its order."""
        key = f"{min(self.a, self.b)}+{max(self.a, self.b)}"
        return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


def all_sums() -> list[Addition]:
    """The 10,000 ordered pairs."""
    return [Addition(a, b) for a in range(100) for b in range(100)]


def sloppy_lessons(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Rows of the warm-up, drawn from the sums that are not held out; the teacher is sloppy about each draw anew."""
    rng = random.Random(seed)
    sums = [one for one in all_sums() if not one.held_out]
    for _ in range(count):
        one = rng.choice(sums)
        answer = one.without_carries if rng.random() < SLOPPINESS else one.answer
        yield {"prompt": one.prompt, "response": answer}


def questions(held_out: bool) -> Iterator[dict[str, str]]:
    """Prompts with their true sums, for rewards."""
    return ({"prompt": one.prompt, "answer": one.answer} for one in all_sums() if one.held_out == held_out)


def tokenizer() -> Tokenizer:
    """One token a character."""
    vocabulary = {text: index for index, text in enumerate((*SPECIAL, *CHARACTERS))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return made


def write_tokenizer(folder: Path) -> None:
    """Writes what transformers' ``AutoTokenizer`` and the worker read."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 64,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def model_config() -> dict:
    """``config.json`` of a Qwen3-MoE with 251,328 parameters."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_task(folder: Path, lessons: int, seed: int) -> None:
    """Writes the task: ``model/`` (config and tokenizer), ``sft.jsonl``, ``prompts.jsonl`` and ``held_out.jsonl``.

    Args:
        folder: where to.
        lessons: rows of the warm-up.
        seed: of the draws of the warm-up.
    """
    write_tokenizer(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(model_config(), indent=2) + "\n")
    for name, rows in (
        ("sft", sloppy_lessons(lessons, seed)),
        ("prompts", questions(held_out=False)),
        ("held_out", questions(held_out=True)),
    ):
        with (folder / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
