"""What vLLM's layerwise reload leaves wrong on CPU, put right: packed experts and packed heads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

Saved = list[tuple[Any, Any, Any]]


def before(model: torch.nn.Module) -> Saved:
    """Makes expert layers pack their weights again.

    On CPU experts are packed only while their method has no kernel; a reload would otherwise copy raw weights into storage
    that the kernel reads as packed.
    """
    saved: Saved = []
    if not _on_cpu(model):
        return saved
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None:
            saved.append((method, kernel, getattr(method, "moe_quant_config", None)))
            method.moe_kernel = None
    return saved


def after(model: torch.nn.Module, saved: Saved) -> None:
    """Puts the kernels back, and packs again what shares a weight with another module (a tied head)."""
    for method, kernel, config in saved:
        method.moe_kernel, method.moe_quant_config = kernel, config
    if not _on_cpu(model):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.ndim == 2 and weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def zero_caches(layers: Iterable[Any]) -> None:
    """Overwrites the KV cache. Kernels multiply what lies in unused slots by 0, and 0 times NaN is NaN."""
    for layer in layers:
        found = getattr(layer, "kv_cache", None)
        for cache in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(cache, torch.Tensor):
                cache.zero_()


def partial_load() -> contextlib.AbstractContextManager:
    """A load that brings a part of the model: versions that check for completeness are told so."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return contextlib.nullcontext()
    return disable_mtp_completeness_check()


def _on_cpu(model: torch.nn.Module) -> bool:
    return all(parameter.device.type in ("cpu", "meta") for parameter in model.parameters())
