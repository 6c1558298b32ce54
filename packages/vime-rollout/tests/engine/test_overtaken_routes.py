"""Routes of a request that an update overtook while its prompt was read."""

from types import SimpleNamespace

import numpy as np
import pytest

from vime_proto.version import policy_version
from vime_rollout.engine import _routes
from vime_rollout.engine._generation import Generation
from vime_rollout.engine._types import Output

MODEL = SimpleNamespace(moe_layer_ids=(0, 1), experts=8, top_k=2)
OLD, NEW = policy_version("run", 0, 1), policy_version("run", 0, 2)


def answer(sent_under, versions):
    """Three prompt tokens; one token under each of ``versions``."""
    coming = iter(versions)
    generation = Generation("id", b"", [3, 4, 5], lambda: next(coming), 1, 1.0, lambda _: None)
    generation.sent_under = sent_under
    routes = np.tile(np.array([1, 2], np.uint8), (3 + len(versions) - 1, 2, 1))
    for place in range(len(versions)):
        last = place == len(versions) - 1
        generation.put(
            Output(tokens=[7], logprobs=[-1.0], finish="length" if last else None, routes=routes if last else None)
        )
    return _routes.trace(generation, MODEL).header


@pytest.mark.parametrize(
    ("sent_under", "versions", "inexact"),
    [
        (OLD, [OLD, OLD], []),
        (OLD, [OLD, NEW], [(3, 4)]),
        (OLD, [NEW, NEW], [(0, 4)]),
        (OLD, [NEW], [(0, 3)]),
        (None, [OLD, OLD], []),
    ],
)
def test_rows_that_may_be_of_the_weights_before_are_inexact(sent_under, versions, inexact):
    header = answer(sent_under, versions)
    assert [(one.start, one.stop) for one in header.inexact] == inexact
    assert not header.holes and header.spans[0].version == versions[0]
