"""What vLLM takes from the environment, set from the configuration before vLLM is imported."""

from __future__ import annotations

import os

from vime_rollout.engine._settings import EngineSettings


def prepare(settings: EngineSettings) -> None:
    """Sets the variables of this process, which vLLM's processes inherit."""
    os.environ.update(
        {
            "VIME_ENGINE": "1",
            # A forked child of a process that has used CUDA, or has gRPC threads, deadlocks.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": settings.log_level,
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            # The default binds threads to cores, and the trainer next door would then share one of them.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    )
    # Threads that spin while they wait slow down whoever shares the cores; a host that is the engine's alone may say otherwise.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.pop("VLLM_PLUGINS", None)
    # The deprecated variable would win over the configuration.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if settings.cpu_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(settings.cpu_threads)


def fork_from_here(eager: bool) -> None:
    """Makes vLLM's processes copies of this one, so that none imports vLLM again: on CPU that is most of a start.

    Call it when vLLM's configuration is made, which on CPU chooses otherwise, while this process has no threads of gRPC and has
    run nothing on threads of OpenMP. Both would deadlock a copy.

    Args:
        eager: compile nothing at all. vLLM's own "eager" still has a C++ compiler make kernels of samplers and routers.
    """
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    if eager:
        import torch._dynamo

        torch._dynamo.config.disable = True
