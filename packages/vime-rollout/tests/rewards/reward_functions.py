"""Rewards of a user, good and bad."""

from __future__ import annotations

import os
import sys
import time

from vime_rollout.rewards import RewardInput, Score


def length(item: RewardInput, *, scale: float = 1.0) -> Score:
    return Score(len(item.response) * scale, {"characters": len(item.response)})


def slow(item: RewardInput, *, seconds: float) -> float:
    time.sleep(seconds)
    return 1.0


def hangs(item: RewardInput) -> float:
    # In C, with the interpreter lock held: no alarm and no exception gets in.
    return float(9 ** int(item.response) % 2) if item.response != "go" else float(9**9**9 % 2)


def raises(item: RewardInput) -> float:
    raise ValueError(f"cannot score {item.response!r}")


def dies(item: RewardInput) -> float:
    os._exit(3)


def closes(item: RewardInput) -> float:
    os.closerange(3, 64)
    time.sleep(60)
    return 1.0


def nothing(item: RewardInput):
    return None


def not_finite(item: RewardInput) -> float:
    return float("nan")


def hoards(item: RewardInput) -> float:
    return float(len(bytearray(3 << 30)))


def prints(item: RewardInput) -> float:
    print("noise " * 1000)
    os.write(1, b"more noise\n")
    sys.stdout.flush()
    return 0.25


def reads_record(item: RewardInput) -> bool:
    return item.record["level"] == 3 and item.turns == ("a", item.response) and item.truncated


def process_id(item: RewardInput) -> float:
    return os.getpid()
