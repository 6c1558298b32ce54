"""Starts ranks as torchrun does: the store is this process's, so its port is one that the system gave."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

__all__ = ["start"]


def start(world: int, script: Path, arguments: list[str], seconds: float) -> None:
    """Runs a script on all ranks and waits for it; on a host with GPUs, where each rank needs its own, skips without enough.

    Raises:
        AssertionError: a rank failed, with what it wrote, or did not end in time.
    """
    gpus = torch.cuda.device_count()
    if 0 < gpus < world:
        pytest.skip(f"{world} ranks need {world} GPUs, this host has {gpus}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = dict(os.environ) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    forked = Path(__file__).with_name("forked.py")
    with tempfile.TemporaryDirectory() as errors:
        command = [sys.executable, "-W", "ignore", forked, str(world), errors, script, *arguments]
        status: int | None = None
        try:
            status = subprocess.run(command, env=environment, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            pass
        texts = [f"rank {path.name}: {path.read_text()[-3000:]}" for path in sorted(Path(errors).iterdir())]
    ended = f"ranks still run after {seconds} s" if status is None else f"ranks ended with {status}"
    assert status == 0, "\n".join([ended, *texts])
