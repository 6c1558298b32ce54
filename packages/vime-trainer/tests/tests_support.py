"""Tiny random models, made by transformers."""

from __future__ import annotations

from pathlib import Path

import torch


def tiny_config(kind: str):
    """A transformers config: qwen3, qwen3_tied, qwen3_moe, glm4_moe or glm4_moe_tied (with norms of queries and keys)."""
    from transformers import Glm4MoeConfig, Qwen3Config, Qwen3MoeConfig

    common = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": 61,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "tie_word_embeddings": kind.endswith("_tied"),
    }
    if kind.startswith("glm4_moe"):
        return Glm4MoeConfig(
            **common,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            n_shared_experts=2,
            routed_scaling_factor=2.5,
            attention_bias=True,
            use_qk_norm=kind.endswith("_tied"),
        )
    if kind != "qwen3_moe":
        return Qwen3Config(**common)
    return Qwen3MoeConfig(
        **common,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    )


def make_folder(kind: str, folder: Path) -> Path:
    """Writes a random model with norm weights that are not 1 and biases that are not 0, so that a mixed-up one shows."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(kind))
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias"):
                value.copy_(0.2 * torch.randn(value.shape))
            elif name.endswith("norm.weight"):
                value.copy_(1.0 + 0.2 * torch.randn(value.shape))
    model.save_pretrained(folder)
    return folder


def make_tokenizer():
    """Letters as tokens, with a chat template that puts a separator after each end token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<pad>", "<bos>", "<eos>", *"abcdefgh=|>;"]
    plain = Tokenizer(models.WordLevel({symbol: place for place, symbol in enumerate(symbols)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '|' if m['role'] == 'user' else '>' }}{{ m['content'] }}<eos>;{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    return tokenizer


def tiny_moe_folder(folder: Path) -> Path:
    """A smaller MoE with the tokenizer, for tests that train."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        vocab_size=20,
        max_position_embeddings=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
