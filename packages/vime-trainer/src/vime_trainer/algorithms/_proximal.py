"""The proximal policy without a forward pass of its own."""

from __future__ import annotations

import numpy as np


def proximal_alpha(behaviour: np.ndarray, proximal: float, current: float) -> np.ndarray:
    """float32 [T]: (v_prox - v_b) / (v - v_b), how far the proximal policy is on the way from engine to live policy.

    1 where the live policy is no newer than the one that sampled: both are the live policy then. See
    `proximal_logprobs`.

    Args:
        behaviour: [T], version of the weights that sampled each token, in batches.
        proximal: version of the weights at the batch's start.
        current: version of the live weights; k of s optimizer steps into the batch it is proximal + k / s.
    """
    behaviour = np.asarray(behaviour, np.float64)
    way = current - behaviour
    alpha = np.divide(proximal - behaviour, way, out=np.ones_like(way), where=way > 0)
    return np.clip(alpha, 0.0, 1.0).astype(np.float32)
