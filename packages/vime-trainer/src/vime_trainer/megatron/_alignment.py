"""Which widths of experts torch's grouped matrix product takes."""

from __future__ import annotations

__all__ = ["check_grouped_experts"]

_COLUMNS = 8
"""Rows of matrices must begin at multiples of 16 bytes, which are eight numbers of bfloat16."""


def check_grouped_experts(hidden: int, width: int, expert_tensor: int) -> None:
    """Checks sizes of a bfloat16 model on a GPU, before anything is built or read.

    Args:
        hidden: size of the residual stream.
        width: columns of a routed expert.
        expert_tensor: ranks that share each expert's matrices; a divisor of `width`.

    Raises:
        ValueError: names the field, its value and the valid ones.
    """
    rule = f"experts in bfloat16 on a GPU need a multiple of {_COLUMNS}"
    if hidden % _COLUMNS:
        raise ValueError(f"hidden_size: {hidden}, but {rule}; such a model runs in dtype float32")
    if width % _COLUMNS:
        raise ValueError(f"moe_intermediate_size: {width}, but {rule}; such a model runs in dtype float32")
    if width // expert_tensor % _COLUMNS:
        valid = [size for size in range(1, width // _COLUMNS + 1) if width % (size * _COLUMNS) == 0]
        raise ValueError(
            f"parallel.expert_tensor: {expert_tensor} leaves {width // expert_tensor} of the model's {width} columns "
            f"(moe_intermediate_size) on a rank, but {rule}; valid: {', '.join(map(str, valid))}"
        )
