"""Weights on the policy loss for the difference between the trainer's old policy and the engine's.

rho = pi_old / mu per token, mu being what the engine sampled from. Weights are detached: a gradient through them would be
biased. Where old policy is the engine itself, rho is 1 and a correction on top would count twice; `check_correction`
refuses that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from vime_proto.errors import nearest

from ._objectives import log_ratio
from ._types import RolloutBatch, Streams

if TYPE_CHECKING:
    import torch

Correction = Callable[["torch.Tensor", Streams, float, float], "torch.Tensor"]


def importance(log_rho: torch.Tensor, streams: Streams, low: float, high: float) -> torch.Tensor:
    """rho as it is, which makes the objective that of decoupled PPO (arXiv:2110.00641)."""
    return log_rho.exp()


def token_tis(log_rho: torch.Tensor, streams: Streams, low: float, high: float) -> torch.Tensor:
    """Truncated importance sampling: min(rho, high) (Yao et al. 2025)."""
    return log_rho.exp().clamp(max=high)


def sequence_tis(log_rho: torch.Tensor, streams: Streams, low: float, high: float) -> torch.Tensor:
    """min(product of rho over the sequence, high), on all its tokens."""
    return streams.to_tokens(_sequence_product(log_rho, streams).clamp(max=high))


def token_mis(log_rho: torch.Tensor, streams: Streams, low: float, high: float) -> torch.Tensor:
    """Masked importance sampling: rho where rho <= high, else 0 (Liu, Li et al. 2025)."""
    rho = log_rho.exp()
    return rho.where(rho <= high, 0)


def sequence_mis(log_rho: torch.Tensor, streams: Streams, low: float, high: float) -> torch.Tensor:
    """The product of rho over the sequence where it is <= high, else 0."""
    product = _sequence_product(log_rho, streams)
    return streams.to_tokens(product.where(product <= high, 0))


def icepop(log_rho: torch.Tensor, streams: Streams, low: float, high: float) -> torch.Tensor:
    """rho where low <= rho <= high, else 0 (Ant Ring team 2025)."""
    rho = log_rho.exp()
    return rho.where((rho >= low) & (rho <= high), 0)


def geometric(log_rho: torch.Tensor, streams: Streams, low: float, high: float) -> torch.Tensor:
    """1 on sequences whose geometric mean of rho lies in [low, high], else 0. Does not depend on length."""
    mean = streams.sequence_mean(log_rho).exp()
    return streams.to_tokens(((mean >= low) & (mean <= high)).to(log_rho.dtype))


def k3(log_rho: torch.Tensor, streams: Streams, low: float, high: float) -> torch.Tensor:
    """1 on sequences whose mean of rho - log rho - 1 is at most `high`, else 0."""
    mean = streams.sequence_mean(log_rho.exp() - log_rho - 1.0)
    return streams.to_tokens((mean <= high).to(log_rho.dtype))


def _sequence_product(log_rho: torch.Tensor, streams: Streams) -> torch.Tensor:
    total = streams.sequence_sum(log_rho)
    return log_ratio(total, total.new_zeros(())).exp()


# Name -> (function, default low, default high).
CORRECTIONS: dict[str, tuple[Correction | None, float, float]] = {
    "none": (None, 0.0, float("inf")),
    "importance": (importance, 0.0, float("inf")),
    "tis": (token_tis, 0.0, 2.0),
    "tis_sequence": (sequence_tis, 0.0, 2.0),
    "mis": (token_mis, 0.0, 2.0),
    "mis_sequence": (sequence_mis, 0.0, 2.0),
    "icepop": (icepop, 0.5, 5.0),
    "geometric": (geometric, 0.99, 1.01),
    "k3": (k3, 0.0, 0.01),
}


def correction_weights(
    name: str,
    old_logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    streams: Streams,
    low: float | None = None,
    high: float | None = None,
) -> torch.Tensor | None:
    """float32 [T], detached, 1 at masked tokens; None for "none".

    Raises:
        ValueError: unknown name.
    """
    if name not in CORRECTIONS:
        raise ValueError(nearest(name, CORRECTIONS, "correction"))
    function, default_low, default_high = CORRECTIONS[name]
    if function is None:
        return None
    import torch

    with torch.no_grad():
        log_rho = log_ratio(old_logprobs, engine_logprobs)
        log_rho = log_rho.where(streams.mask, 0)
        weights = function(
            log_rho, streams, default_low if low is None else low, default_high if high is None else high
        )
        return weights.where(streams.mask, 1)


def correction_scale(batch: RolloutBatch, settings, mask: np.ndarray) -> np.ndarray:
    """float32 [T]: 1 / the mean of the correction's weights over the tokens under `mask`, on those tokens.

    Multiplied by it, the weights have mean 1 over the whole batch of an optimizer step, however it is cut.

    Args:
        batch: its log-probs hold "old" and "engine".
        settings: of the algorithm.
        mask: bool [T], trainable tokens of the optimizer step.
    """
    import torch

    bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(batch.lengths)]))
    kept = torch.from_numpy(mask)
    old, engine = (torch.from_numpy(np.where(mask, batch.logprobs[name], np.float32(0))) for name in ("old", "engine"))
    weights = correction_weights(
        settings.correction, old, engine, Streams(kept, bounds, {}), settings.correction_low, settings.correction_high
    )
    scale = 1.0
    if weights is not None and mask.any():
        mean = float(weights[kept].double().mean())
        # Where every token is rejected there is nothing to normalise.
        scale = 1.0 / mean if mean > 0 else 1.0
    return np.where(mask, scale, 0.0).astype(np.float32)


def sequence_mask(logprobs: torch.Tensor, streams: Streams, threshold: float) -> torch.Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556): float [T], detached, 0 on what is dropped.

    Dropped are tokens of negative advantage in sequences whose mean of log mu - log pi exceeds the threshold: sequences
    that the policy has moved away from, and that would push it further.
    """
    import torch

    with torch.no_grad():
        gap = log_ratio(streams["engine_logprobs"], logprobs)
        far = streams.to_tokens(streams.sequence_mean(gap) > threshold)
        return (~(far & (streams["advantages"] < 0))).to(logprobs.dtype)


def check_correction(old_policy: str, correction: str, max_staleness: int, uncorrected: bool) -> None:
    """Refuses combinations that are wrong by construction.

    Raises:
        ValueError: a second correction on top of old policy "engine"; or asynchronous training without any correction.
    """
    if old_policy == "engine" and correction != "none":
        raise ValueError(
            f'algorithm.correction: {correction!r} with old_policy "engine" corrects twice, as the ratio to the engine is '
            'already in the objective; set correction = "none"'
        )
    if old_policy != "engine" and correction == "none" and max_staleness > 0 and not uncorrected:
        raise ValueError(
            f'algorithm.correction: "none" with old_policy "{old_policy}" and max_staleness {max_staleness} trains on '
            'stale samples without any correction; set correction = "tis", or old_policy = "engine", or uncorrected = true'
        )
