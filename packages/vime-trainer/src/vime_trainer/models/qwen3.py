"""Qwen3, dense (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from vime_trainer.models._architecture import Architecture
from vime_trainer.models._config_file import HfConfig
from vime_trainer.models._decoder import ATTENTION, DENSE, ENDS, sizes
from vime_trainer.models._family import Family

__all__ = ["FAMILY", "qwen3_sizes"]


def qwen3_sizes(config: HfConfig) -> dict[str, object]:
    """What dense and MoE models share.

    Raises:
        ValueError: a key is missing or asks for something else than Qwen3.
    """
    config.demand("use_sliding_window", False)
    config.demand("attention_bias", False)
    config.demand_rotary_fraction(1.0)
    return sizes(config, norm_eps=1e-6)


def _architecture(config: HfConfig) -> Architecture:
    # The dense family's heads are that wide whatever the hidden size, where the file does not say.
    head_dim = config.get("head_dim", default=128)
    return Architecture(**qwen3_sizes(config) | {"head_dim": head_dim})  # type: ignore[arg-type]


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), _architecture, (*ENDS, *ATTENTION, *DENSE))
