"""vLLM's AsyncLLM behind a small interface. Everything runs on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from vime_proto.rollout.v1 import rollout_pb2
from vime_rollout.engine._model import ModelDescription
from vime_rollout.engine._settings import EngineSettings
from vime_rollout.engine._types import BackendDeadError, Sampling, Sink
from vime_rollout.engine.backend import _environment, plugin

_GIB = 1 << 30


class Backend:
    """One running vLLM. Make it with ``Backend.start``."""

    def __init__(self, engine: Any, tasks: tuple[str, ...], settings: EngineSettings):
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        from vime_rollout.engine.backend._collect import SinkCollector

        self._engine = engine
        self._tasks = tasks
        self._settings = settings
        self._params_type = SamplingParams
        self._kind = RequestOutputKind.DELTA
        self._collector = SinkCollector
        self._prompt = _prompt_function() or (lambda ids: TokensPrompt(prompt_token_ids=ids))

    # Life -----------------------------------------------------------------------------------------------------

    @classmethod
    async def start(cls, settings: EngineSettings, model: ModelDescription) -> Backend:
        """Loads the model. Must run in the main thread, before gRPC has any.

        Raises:
            RuntimeError: vime-rollout is not installed (only importable), so that vLLM cannot find its plugin.
        """
        _require_plugin()
        _environment.prepare(settings)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**engine_arguments(settings, model))
        if current_platform.is_cpu():
            config = arguments.create_engine_config()
            _environment.fork_from_here(eager=config.model_config.enforce_eager)
            engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        else:
            engine = AsyncLLM.from_engine_args(arguments)
        if _joined_outputs() is not None:
            from vime_rollout.engine.backend import _packing

            _packing.take_apart(engine.output_processor)
        return cls(engine, await engine.get_supported_tasks(), settings)

    @property
    def alive(self) -> bool:
        """Whether vLLM's processes run."""
        return not self._engine.errored

    def stop(self) -> None:
        """Ends vLLM's processes."""
        # Older versions take no time limit.
        if "timeout" in inspect.signature(self._engine.shutdown).parameters:
            self._engine.shutdown(timeout=3.0)
        else:
            self._engine.shutdown()

    @functools.cached_property
    def layout(self) -> rollout_pb2.EngineLayout:
        """How the weights are spread over devices."""
        parallel = self._engine.vllm_config.parallel_config
        return rollout_pb2.EngineLayout(
            tensor_parallel=parallel.tensor_parallel_size,
            pipeline_parallel=parallel.pipeline_parallel_size,
            data_parallel=parallel.data_parallel_size,
            expert_parallel=parallel.tensor_parallel_size * parallel.data_parallel_size
            if parallel.enable_expert_parallel
            else 1,
        )

    @functools.cached_property
    def gpu_uuids(self) -> list[str]:
        """UUIDs of the GPUs, in rank order; empty on CPU."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            return []
        return [
            str(current_platform.get_device_uuid(rank))
            for rank in range(self._engine.vllm_config.parallel_config.world_size)
        ]

    @functools.cached_property
    def kernels(self) -> dict[str, str]:
        """Kernel backend by module kind, as far as vLLM's configuration says."""
        from vllm.platforms import current_platform

        config = self._engine.vllm_config
        found = {"platform": current_platform.device_name or str(current_platform.device_type)}
        for kind, section, key in (
            ("moe", "kernel_config", "moe_backend"),
            ("attention", "attention_config", "backend"),
        ):
            value = getattr(getattr(config, section, None), key, None)
            if value is not None:
                found[kind] = getattr(value, "name", str(value)).lower()
        return found

    # Requests -------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Requests that vLLM has."""
        return self._engine.output_processor.get_num_unfinished_requests()

    def submit(self, request_id: str, prompt: Sequence[int], sampling: Sampling, sink: Sink, priority: int = 0):
        """Registers a request at once, so that a pause that follows knows it; await the result to send it.

        Returns an awaitable of the id that ``abort`` takes.
        """
        engine = self._engine
        if engine.errored:
            raise BackendDeadError("vLLM's engine core has ended")
        request = engine.input_processor.process_inputs(
            request_id,
            self._prompt(list(prompt)),
            self._params(sampling),
            supported_tasks=self._tasks,
            priority=priority,
        )
        engine.input_processor.assign_request_id(request)
        engine.output_processor.add_request(request, None, None, 0, self._collector(request.request_id, sink))
        return self._send(request)

    async def _send(self, request: Any) -> str:
        with _dead_engine():
            await self._engine.engine_core.add_request_async(request)
        return request.request_id

    async def abort(self, internal_ids: Iterable[str]) -> None:
        """Ends requests; each sink gets a last output with finish "abort" before this returns."""
        with _dead_engine():
            await self._engine.abort(list(internal_ids), internal=True)

    def _params(self, sampling: Sampling) -> Any:
        return self._params_type(
            n=1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            max_tokens=sampling.max_new_tokens,
            min_tokens=sampling.min_new_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            logprobs=sampling.top_logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            flat_logprobs=True,
            skip_clone=True,
            detokenize=False,
            output_kind=self._kind,
        )

    # Pause ----------------------------------------------------------------------------------------------------

    async def pause(self, keep: bool) -> None:
        """Stops scheduling and clears the prefix cache. Requests are aborted, or kept frozen.

        When it returns, every output computed before the pause has reached its sink.
        """
        with _dead_engine():
            await self._engine.pause_generation(mode="keep" if keep else "abort", clear_cache=True)
            await self._drain()

    async def resume(self) -> None:
        """Schedules again."""
        with _dead_engine():
            await self._engine.resume_generation()

    async def clear_cache(self) -> None:
        """Forgets every cached prefix."""
        with _dead_engine():
            await self._engine.reset_prefix_cache()

    async def _drain(self) -> None:
        # The pause's answer came through the same socket after the last outputs, so these are in this queue or beyond. The
        # output loop takes them without a break but for one yield per 128 outputs.
        queue = self._engine.engine_core.outputs_queue
        turns = self._settings.max_num_seqs // 128 + 4
        while turns and self.alive:
            turns -= queue.empty()
            await asyncio.sleep(0)

    async def sleep(self, level: int, keep: bool) -> None:
        """Releases memory; on CPU vLLM keeps it and only the state changes."""
        with _dead_engine():
            await self._engine.sleep(level=level, mode="keep" if keep else "abort")

    async def wake(self, tags: Sequence[str]) -> None:
        """Takes memory again: "weights", "kv_cache"."""
        with _dead_engine():
            await self._engine.wake_up(tags=list(tags))

    # Weights --------------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        """Opens an update in every worker; the model is as it was until the first chunk."""
        with _dead_engine():
            try:
                await self._engine.start_weight_update()
            except Exception:
                # An update that ended without an answer may still be open in a worker.
                await self._engine.finish_weight_update()
                await self._engine.start_weight_update()

    async def load_chunk(self, path: str, fills: list[list[Any]], names: list[str] | None) -> None:
        """Loads a chunk that lies in a file; see ``_transfer.VimeChunk``."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info={"path": path, "fills": fills, "names": names})
        with _dead_engine():
            await self._engine.update_weights(request)

    async def end_update(self, clear_cache: bool = False) -> None:
        """Makes the loaded weights the model's; also ends an update that is given up.

        ``clear_cache`` overwrites the KV cache, which may hold what is not finite.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with _dead_engine():
            if clear_cache:
                await self._engine.update_weights(WeightTransferUpdateRequest(update_info={"clear_cache": True}))
            await self._engine.finish_weight_update()
            await self._engine.reset_prefix_cache()


def engine_arguments(settings: EngineSettings, model: ModelDescription) -> dict[str, Any]:
    """vLLM's engine arguments."""
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": str(model.folder),
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": model.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "enable_prefix_caching": settings.prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "hf_overrides": {"head_dtype": "float32"},
        "enforce_eager": on_cpu if settings.enforce_eager is None else settings.enforce_eager,
        "weight_transfer_config": WeightTransferConfig(backend=plugin.NAME),
        "disable_log_stats": True,
    }
    if settings.route_capture:
        arguments["enable_return_routed_experts"] = True
    if scheduler := _joined_outputs():
        arguments["scheduler_cls"] = scheduler.NAME
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = int(settings.kv_cache_gib * _GIB)
        # A prompt that is read in parts takes back what its seed's generator drew, which a generator on CPU cannot: vLLM would die.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["enable_sleep_mode"] = True
    return {**arguments, **settings.vllm}


def _joined_outputs() -> Any:
    """The module of cheaper outputs; None with a vLLM that it was not tested with, which then sends them in its own way."""
    from vime_rollout.engine.backend import _scheduler

    return _scheduler if _scheduler.is_known() else None


def _require_plugin() -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name=plugin.NAME)
    if not any(entry.value.startswith("vime_rollout.") for entry in found):
        raise RuntimeError(
            "vLLM cannot find the entry point 'vime' of vime-rollout: install the package (pip install vime-rollout), "
            "a source folder on PYTHONPATH is not enough"
        )


def _prompt_function() -> Any:
    try:
        from vllm.inputs import tokens_input
    except ImportError:
        return None
    return tokens_input


@contextlib.contextmanager
def _dead_engine():
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise BackendDeadError("vLLM's engine core has ended") from error


__all__ = ["Backend", "engine_arguments"]
