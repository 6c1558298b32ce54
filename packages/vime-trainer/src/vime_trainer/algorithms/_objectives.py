"""Policy objectives, per token, as losses to be minimised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._types import Streams, Terms

if TYPE_CHECKING:
    import torch

LOG_RATIO_LIMIT = 20.0


def log_ratio(logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """log(pi / pi_old), clamped to +-20 so that its exponential stays finite."""
    return (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped objective (arXiv:1707.06347) with two bounds; dual clip (arXiv:1912.09729) where advantages are negative.

    Args:
        ratio, advantages: [T].
        low, high: the ratio is clipped to [1 - low, 1 + high].
        dual: c > 1; bounds the objective from below by c * advantage for negative advantages.

    Returns:
        The loss [T] (minus the objective), and bool [T]: where the clipped branch was taken, so that there is no gradient.
    """
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    objective = plain.minimum(bounded)
    cut = bounded < plain
    if dual is not None:
        floor = dual * advantages
        below = (advantages < 0) & (objective < floor)
        objective = floor.where(below, objective)
        cut = cut | below
    return -objective, cut.detach()


def token_clipped_loss(logprobs: torch.Tensor, entropy: torch.Tensor, streams: Streams, settings) -> Terms:
    """PPO's objective with a ratio per token: GRPO, Dr. GRPO, RLOO and DAPO."""
    old = streams.old_logprobs(logprobs)
    ratio = log_ratio(logprobs, old).exp()
    loss, cut = clipped(ratio, streams["advantages"], settings.clip_low, settings.clip_high, settings.clip_dual)
    return Terms(loss, ratio_metrics(logprobs, old, ratio, cut))


def ratio_metrics(
    logprobs: torch.Tensor, old: torch.Tensor, ratio: torch.Tensor, cut: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The ratio itself, the share clipped, and the share whose logarithm hit its limit."""
    return {
        "ratio": ratio.detach(),
        "clip_fraction": cut.float(),
        "ratio_limit_fraction": ((logprobs - old).detach().abs() > LOG_RATIO_LIMIT).float(),
    }
