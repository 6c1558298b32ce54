"""The whole loss of a micro-batch: the algorithm's terms, corrected, with entropy bonus and KL, masked and weighted.

The critic's loss is masked and weighted in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._corrections import correction_weights, sequence_mask
from ._kl import beyond_limit, kl_terms
from ._types import Algorithm, Streams

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Objective:
    """Loss of one micro-batch.

    Attributes:
        loss: scalar; the losses of a batch's micro-batches add up to the batch's loss.
        metrics: float32 [T] each, detached, by name.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def objective(
    algorithm: Algorithm,
    settings,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    streams: Streams,
) -> Objective:
    """Evaluates the loss. `streams["weights"]` [T] carries the aggregation (see `token_weights`).

    Values at masked positions are replaced before any arithmetic, so NaN or infinity there changes nothing.
    """
    logprobs = logprobs.where(streams.mask, 0)
    entropy = entropy.where(streams.mask, 0)
    terms = algorithm.loss(logprobs, entropy, streams, settings)
    total, metrics = terms.loss, dict(terms.metrics)
    old = streams.old_logprobs(logprobs)
    if settings.old_policy != "engine" and settings.correction != "none":
        weights = correction_weights(
            settings.correction,
            old,
            streams["engine_logprobs"],
            streams,
            settings.correction_low,
            settings.correction_high,
        )
        scale = streams.values.get("correction_scale")
        weights = weights if scale is None else weights * scale
        total = total * weights
        metrics["correction_weight"] = weights
    if settings.sequence_mask is not None:
        kept = sequence_mask(logprobs, streams, settings.sequence_mask)
        total = total * kept
        metrics["sequence_mask"] = kept
    if settings.entropy_coefficient:
        total = total - settings.entropy_coefficient * entropy
    reference = streams.values.get("reference_logprobs")
    if reference is not None:
        kl = kl_terms(logprobs, reference, settings.kl.estimator)
        if settings.kl.place == "loss":
            total = total + settings.kl.coefficient * kl
        # A copy: the metric must not change with what happens to the tensor later.
        metrics["kl"] = kl.detach().clone()
        metrics["kl_limit_fraction"] = beyond_limit(logprobs, reference)
    metrics["entropy"] = entropy.detach().clone()
    total = total.where(streams.mask, 0)
    return Objective((total * streams["weights"]).sum(), metrics)


def critic_objective(algorithm: Algorithm, settings, values: torch.Tensor, streams: Streams) -> Objective:
    """Evaluates the critic's loss, from live values [T]; `streams["weights"]` carries the aggregation.

    Values at masked positions are replaced before any arithmetic.
    """
    terms = algorithm.value_loss(values.where(streams.mask, 0), streams, settings)
    total = terms.loss.where(streams.mask, 0)
    return Objective((total * streams["weights"]).sum(), dict(terms.metrics))
