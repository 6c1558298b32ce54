from __future__ import annotations

import numpy as np

from vime_proto.fakes import build
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_numpy
from vime_proto.validate import validate_sample
from vime_proto.version import policy_version
from vime_rollout.worker import train_once

V = policy_version("run", 0, 0)


def branch(name, *turns):
    segments = [build.prompt_segment((1, 2, 3))]
    for request_id, tokens in turns:
        segment = build.model_segment(V, tokens, [-0.5] * len(tokens))
        segment.generation.request_id = request_id
        segments.append(segment)
    return pb.Sample(sample_id=name, segments=segments)


def masks(sample):
    found = []
    for segment in sample.segments:
        length = segment.token_ids.shape[0]
        if segment.WhichOneof("trainable") == "trainable_mask":
            found += to_numpy(segment.trainable_mask).tolist()
        else:
            found += [segment.trainable_all] * length
    return np.array(found, dtype=int)


def test_a_prefix_that_three_branches_share_is_trained_once():
    shared = ("r0", (10, 11, 12, 13, 14))
    branches = [branch(f"b{n}", shared, (f"r1{n}", (20 + n, 21))) for n in range(3)]
    train_once(branches)
    trained = sum(masks(one) for one in branches)
    assert trained[3:8].sum() == 5
    assert [masks(one)[8:].tolist() for one in branches] == [[1, 1]] * 3
    for one in branches:
        validate_sample(one)


def test_equal_tokens_of_different_requests_are_each_trained():
    branches = [branch("a", ("r0", (10, 11))), branch("b", ("r1", (10, 11)))]
    train_once(branches)
    assert [masks(one).sum() for one in branches] == [2, 2]


def test_a_branch_within_a_request_shares_what_comes_before():
    branches = [branch("a", ("r0", (10, 11, 12))), branch("b", ("r0", (10, 11, 99)))]
    train_once(branches)
    assert masks(branches[1]).tolist() == [0, 0, 0, 0, 0, 1]
