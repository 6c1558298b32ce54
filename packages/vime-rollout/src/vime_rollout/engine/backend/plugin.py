"""Entry point ``vllm.general_plugins``: runs in every vLLM process that is started on this host."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import threading

NAME = "vime"


def register() -> None:
    """Registers the weight transport, and ties a child process to the life of its parent.

    Raises:
        ValueError: the name is taken by another package.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(NAME, "vime_rollout.engine.backend._transfer", "VimeTransfer")
    except ValueError as error:
        # vLLM itself, or another plug-in, has one of this name: its bytes would go elsewhere than where we send them.
        raise ValueError(f"vime-rollout cannot register the weight transport {NAME!r} with vLLM: {error}") from error
    if os.environ.get("VIME_ENGINE"):
        _in_child()
        # vLLM does not load plug-ins again in a process that is a copy of one which has.
        multiprocessing.util.register_after_fork(register, lambda _: _in_child())


def _in_child() -> None:
    if multiprocessing.parent_process() is not None:
        _end_with_parent()
        _ask_for_amx()


def _end_with_parent() -> None:
    # vLLM's core process outlives a front end that is killed: the sentinel becomes readable however the parent ends.
    sentinel = multiprocessing.parent_process().sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _ask_for_amx() -> None:
    # vLLM asks the kernel for AMX where it binds threads to cores, which engines do not; unasked, its bfloat16 experts die of an
    # illegal instruction.
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
