"""Lengths of micro-batches on which ranks agree that exchange tokens for experts."""

from types import SimpleNamespace

import numpy as np
import pytest

from vime_trainer.megatron import ParallelConfig
from vime_trainer.policy._layouts import agreed_lengths


def agreed(lengths, free=False, **sizes):
    """What each rank takes, of a world of one stage; `lengths` by data rank."""
    config = ParallelConfig(**sizes)
    replica, exchange = config.tensor * config.context, config.expert * config.expert_tensor
    world = len(lengths) * replica
    given = [lengths[rank // replica] for rank in range(world)]
    coordinates = [SimpleNamespace(expert_data=rank // exchange) for rank in range(world)]
    gathered = [np.array(one, dtype=np.int64) for one in given]
    return [
        agreed_lengths(
            given[rank],
            SimpleNamespace(gather=lambda _: gathered, coordinates=coordinates, config=config, rank=rank),
            free,
        )
        for rank in range(world)
    ]


def test_ranks_that_share_experts_take_the_longest():
    assert agreed([[3, 9], [5, 2], [1, 1], [4, 7]], expert=2) == [[5, 9], [5, 9], [4, 7], [4, 7]]


def test_replicas_within_a_group_of_experts_and_around_it():
    assert agreed([[3], [5]], tensor=2, expert=4) == [[5]] * 4
    assert agreed([[3], [5]], tensor=4, expert=2) == [[3]] * 4 + [[5]] * 4


def test_a_replica_that_lies_in_two_groups_of_experts_has_one_length():
    # Groups are ranks 0 to 2 and 3 to 5; ranks 2 and 3 are one replica.
    assert agreed([[3], [4], [9]], tensor=2, expert=3) == [[9]] * 6


def test_any_lengths_and_unequal_numbers():
    assert agreed([[3], [5]], free=True, expert=2) == [[3], [5]]
    with pytest.raises(ValueError, match="different numbers of them, from 1 to 2"):
        agreed([[3], [5, 6]], expert=2)
