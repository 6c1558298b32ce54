"""Configuration of ``vime-rollout engine``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from vime_proto.channel import split_address
from vime_proto.settings import ServerSettings, Settings


class EngineSettings(Settings):
    """One engine: a model folder, where it listens, and how it runs."""

    model: str = Field(description="Hugging Face folder: config.json and safetensors")
    engine_id: str = Field("engine-0", min_length=1, description="unique within the fleet")
    run_id: str = Field("run", min_length=1, description="run whose number 0 of lineage 0 the folder holds")
    router: str | None = Field(None, description="host:port of a router to register at")
    router_token_file: str | None = Field(None, description="file with the bearer token that the router asks for")
    router_tls_ca: str | None = Field(
        None, description="PEM file of the authority that signed the router's certificate; turns TLS on"
    )
    weights: str | None = Field(
        None, description="host:port of the trainer's WeightService; a late or restarted engine catches up from it"
    )
    weights_token_file: str | None = Field(None, description="file with the bearer token that the trainer asks for")
    weights_tls_ca: str | None = Field(
        None, description="PEM file of the authority that signed the trainer's certificate; turns TLS on"
    )
    weights_seconds: float = Field(
        20.0, gt=0, description="how long the start waits for the trainer to answer; then it serves what the folder holds"
    )
    advertise: str | None = Field(None, description="host:port that the router is told; default: where it listens")
    lease_seconds: float = Field(10.0, gt=0, description="for how long a registration holds; renewed at a third of it")
    labels: dict[str, str] = Field({}, description="words that describe the engine to the router")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="element type of the weights")
    max_model_len: int | None = Field(
        None, ge=2, description="most tokens of prompt and response; default: the model's"
    )
    route_capture: bool = Field(False, description="return routed experts; proved by a request before serving")
    file_root: str | None = Field(None, description="fsspec URI that roots of the file transport must lie under")
    shm_root: str = Field("/dev/shm", description="folder that roots of the shm transport must lie under")
    seed: int = Field(0, ge=0, description="seed of sampling")
    max_num_seqs: int = Field(256, ge=1, description="most requests decoded at once")
    kv_cache_gib: float = Field(1.0, gt=0, description="GiB of KV cache on CPU; a GPU takes what is free")
    cpu_threads: int | None = Field(None, ge=1, description="OpenMP threads on CPU; default: those of the process")
    enforce_eager: bool | None = Field(None, description="no compilation and no graphs; default: true on CPU only")
    prefix_caching: bool = Field(True, description="reuse the KV cache of equal prefixes (of one version)")
    message_tokens: int = Field(64, ge=1, description="new tokens after which a message is sent")
    message_seconds: float = Field(0.5, gt=0, description="seconds after which new tokens are sent, however few")
    replay_capacity: int = Field(4096, ge=1, description="finished answers kept for repeated request ids")
    replay_tokens: int = Field(4_000_000, ge=1, description="tokens of the answers kept")
    minimum_version_seconds: float = Field(5.0, ge=0, description="how long a request waits for its minimum version")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("WARNING", description="of vLLM's log")
    vllm: dict[str, Any] = Field({}, description="further engine arguments of vLLM, by name")
    server: ServerSettings = ServerSettings()
    address_file: str | None = Field(None, description="written once the server listens")
    exit_with_parent: bool = Field(False, description="end when the parent process ends")

    @field_validator("router", "weights", "advertise")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        # Said now, not after half a minute of loading.
        if value is not None:
            split_address(value)
        return value

    @field_validator("vllm")
    @classmethod
    def _own_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = {
            "model": "model", "dtype": "dtype", "max_model_len": "max_model_len", "seed": "seed",
            "enable_return_routed_experts": "route_capture", "max_num_seqs": "max_num_seqs",
            "enforce_eager": "enforce_eager", "enable_prefix_caching": "prefix_caching",
        }  # fmt: skip
        for name, key in taken.items():
            if name in value:
                raise ValueError(f"{name} is set by the key {key!r}")
        return value
