"""Starts ranks as torchrun does: the store is this process's, so its port is one that the system gave."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

__all__ = ["start"]


def start(world: int, script: Path, arguments: list[str], seconds: float) -> None:
    """Runs a script on all ranks and waits for it.

    Raises:
        AssertionError: a rank failed, with what it wrote, or did not end in time.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = dict(os.environ) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), *arguments],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    end = time.monotonic() + seconds
    try:
        # The first to fail explains why the others wait.
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            assert time.monotonic() < end, f"ranks still run after {seconds} s: {[rank.poll() for rank in ranks]}"
            try:
                ranks[0].wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            ranks[-1].wait(timeout=max(0.1, end - time.monotonic()))
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
        errors = [rank.communicate()[1] for rank in ranks]
    failed = [f"rank {number}: {text[-3000:]}" for number, text in enumerate(errors) if ranks[number].returncode]
    assert not failed, "\n".join(failed)
