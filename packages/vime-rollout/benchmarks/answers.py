"""How long the answers of a benchmark are: a burst or a steady load."""

from __future__ import annotations

import argparse

import numpy as np


def add_waves(parser: argparse.ArgumentParser) -> None:
    """The option that chooses between the two."""
    parser.add_argument("--waves", type=int, default=1, help="requests for each of the places")


def lengths(options: argparse.Namespace) -> list[int]:
    """Tokens of each answer, in every round and of every engine the same; at most ``longest``."""
    if options.waves == 1:
        return [options.tokens] * options.requests
    least, count = options.tokens // 2, options.requests * options.waves
    return np.random.default_rng(0).integers(least, longest(options) + 1, count).tolist()


def longest(options: argparse.Namespace) -> int:
    """Tokens that an answer may have."""
    return options.tokens + options.tokens // 2
