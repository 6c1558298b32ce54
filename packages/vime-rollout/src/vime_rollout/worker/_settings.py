"""Configuration of ``vime-rollout worker``."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from vime_proto.channel import split_address
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.settings import Section, Settings


class SamplingSettings(Section):
    """How tokens are drawn; absent keys leave the contract's default."""

    temperature: float = Field(1.0, gt=0, description="divides the logits; above 0 (evaluations may set 0)")
    top_p: float | None = Field(None, gt=0, le=1, description="nucleus mass")
    top_k: int | None = Field(None, ge=0, description="most likely tokens kept; 0 is off")
    min_p: float | None = Field(None, ge=0, le=1, description="smallest probability kept, relative to the largest")
    max_new_tokens: int = Field(1024, ge=1, description="most tokens of one model turn")
    min_new_tokens: int | None = Field(
        None, ge=0, description="fewest tokens before a stop counts; the trainer refuses samples with it"
    )
    stop_token_ids: list[int] = Field([], description="token ids that end a turn")
    stop: list[str] = Field([], description="strings that end a turn")
    include_stop: bool | None = Field(None, description="whether the tokens of a stop string stay in the response")
    ignore_eos: bool | None = Field(None, description="whether end-of-sequence tokens are generated through")
    repetition_penalty: float | None = Field(None, gt=0, description="as in CTRL")
    frequency_penalty: float | None = Field(None, description="subtracted per occurrence of a token")
    presence_penalty: float | None = Field(None, description="subtracted for every token that occurred")

    def message(self) -> pb.SamplingParams:
        """The parameters as a message; keys left out stay absent."""
        return pb.SamplingParams(**self.model_dump(exclude_none=True))


class WorkerSettings(Settings):
    """Everything that a worker needs to know."""

    run_id: str = Field(description="the run")
    buffer: str = Field(description="host:port of the buffer")
    rollout: str = Field(description="host:port of the router, or of an engine")
    tokenizer: str = Field(description="folder with tokenizer.json, and tokenizer_config.json for a chat template")
    worker_id: str = Field("worker-0", description="name of this worker; two that run at once need two names")
    seed: int = Field(0, ge=0, description="seed of the run; requests and environments derive theirs from it")
    seeded_requests: bool = Field(
        True,
        description="every request has a seed of its own, so that it draws alike whatever else runs; off leaves training's random "
        "numbers to the engine: faster on vLLM's V1 runner, not reproducible request by request; evaluations keep seeds",
    )
    max_groups_in_flight: int = Field(32, ge=1, description="groups generated or scored at once")
    sampling: SamplingSettings = SamplingSettings()
    reward: str = Field("exact", description="name of the default reward")
    rewards: dict[str, dict[str, Any]] = Field(
        {}, description="[rewards.NAME]: function = name or module:function, and options"
    )
    reward_workers: int = Field(2, ge=1, description="scoring processes")
    reward_timeout_seconds: float = Field(10.0, gt=0, description="run time of one reward; then its process is ended")
    reward_memory_mib: int = Field(4096, ge=0, description="data memory of a scoring process; 0 sets no limit")
    route_capture: bool = Field(False, description="ask the engine for expert routes")
    teacher: str | None = Field(
        None,
        description="host:port of a RolloutService whose log-probs of the sampled tokens are stored, for distillation",
    )
    teacher_temperature: float | None = Field(
        None, gt=0, description="divides the teacher's logits; must be stated with teacher"
    )
    teacher_retry_seconds: float = Field(
        600.0, gt=0, description="how long the teacher may be unavailable before a rollout fails"
    )
    teacher_token_file: str | None = Field(None, description="file with the bearer token of the teacher")
    environment: str = Field("", description="module:factory of an Environment; empty is single turn")
    environment_options: dict[str, Any] = Field({}, description="keyword arguments of the factory")
    max_turns: int = Field(16, ge=1, description="most model turns of a rollout")
    chat_template_kwargs: dict[str, Any] = Field({}, description="variables handed to the chat template")
    add_special_tokens: bool = Field(False, description="whether text prompts get the tokenizer's special tokens")
    lease_wait_seconds: float = Field(2.0, gt=0, description="length of one long poll for prompts; a stop waits for it")
    connect_seconds: float = Field(
        600.0, gt=0, description="how long buffer or run may be missing before the worker gives up"
    )
    generate_retry_seconds: float = Field(
        600.0, gt=0, description="how long engines may be unavailable before a rollout fails"
    )
    inline_routing_mib: int = Field(64, ge=0, description="larger routes of a group go to the buffer as blobs")
    token_file: str | None = Field(None, description="file with the bearer token of buffer and router")
    tls_ca: str | None = Field(None, description="PEM file; turns TLS on")
    exit_with_parent: bool = Field(False, description="end when the parent process ends")

    @model_validator(mode="after")
    def _whole_teacher(self) -> WorkerSettings:
        if self.teacher is None and self.teacher_temperature is not None:
            raise ValueError("teacher: missing, though teacher_temperature is stated")
        if self.teacher is not None and self.teacher_temperature is None:
            raise ValueError(
                "teacher_temperature: must be stated with teacher; 1.0 takes the teacher's logits as they are"
            )
        return self

    @field_validator("buffer", "rollout", "teacher")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value

    @field_validator("run_id", "worker_id")
    @classmethod
    def _not_empty(cls, value: str) -> str:
        if not value:
            raise ValueError("must not be empty")
        return value
