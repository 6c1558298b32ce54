"""Several samples of one rollout: what they share is trained once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_numpy, to_tensor


def train_once(samples: Sequence[pb.Sample]) -> None:
    """Leaves each sampled token trainable in the first of the samples that holds it, in place.

    Branches of one trajectory begin with the same tokens. A token is shared when everything up to it is the same in an
    earlier sample, where it was sampled in the same request; left trainable in each, it would get its gradient that many times.
    """
    seen: list[tuple[np.ndarray, list[tuple[int, int, str]]]] = []
    for sample in samples:
        ids = np.concatenate([to_numpy(one.token_ids, "token_ids") for one in sample.segments])
        spans, offset = [], 0
        for segment in sample.segments:
            length = len(segment.token_ids.data) // 4
            if segment.HasField("generation"):
                shared = max((_shared(ids, offset, length, segment, *other) for other in seen), default=0)
                if shared:
                    _untrain(segment, length, shared)
                spans.append((offset, length, segment.generation.request_id))
            offset += length
        seen.append((ids, spans))


def _shared(ids: np.ndarray, start: int, length: int, segment: pb.Segment, other: np.ndarray, spans) -> int:
    """Tokens of the segment that the other sample holds in the same place, after the same tokens, from the same request."""
    common = min(len(ids), len(other))
    different = np.flatnonzero(ids[:common] != other[:common])
    prefix = int(different[0]) if len(different) else common
    for other_start, other_length, request_id in spans:
        if other_start == start and request_id == segment.generation.request_id:
            return max(0, min(prefix - start, length, other_length))
    return 0


def _untrain(segment: pb.Segment, length: int, shared: int) -> None:
    if segment.WhichOneof("trainable") == "trainable_mask":
        mask = to_numpy(segment.trainable_mask, "trainable_mask").copy()
    else:
        mask = np.full(length, segment.trainable_all)
    mask[:shared] = False
    segment.trainable_mask.CopyFrom(to_tensor(mask))
