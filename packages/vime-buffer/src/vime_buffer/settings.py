"""Configuration of ``vime-buffer serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from google.protobuf import json_format
from pydantic import Field, field_validator

from vime_buffer._loading import load_group_filter, load_message_format
from vime_buffer._sources import FieldMapping, JsonlFile, PromptSource
from vime_proto.errors import ContractError, nearest
from vime_proto.sample.v1 import sample_pb2
from vime_proto.settings import Section, ServerSettings, Settings
from vime_proto.validate import validate_sampling


class PromptFile(Section):
    """A data set of prompts."""

    path: str = Field(description="the file")
    format: Literal["jsonl"] = Field("jsonl", description="how it is written")
    name: str | None = Field(None, description="name of the data set; the file's stem when absent")
    text_field: str | None = Field(
        None, description='field with text; "prompt" when neither it nor messages_field is given'
    )
    messages_field: str | None = Field(None, description="field with chat messages")
    answer_field: str | None = Field(None, description="field with the reference answer")
    reward_field: str | None = Field(None, description="field with the name of the reward")
    reward: str = Field("", description="name of the reward; empty takes the worker's default")
    start: int | None = Field(None, description="first row kept; negative counts from the end")
    stop: int | None = Field(None, description="row after the last one kept; negative counts from the end")

    def open(self, field: str, message_format: str | None) -> tuple[str, JsonlFile, FieldMapping]:
        """Name, rows and mapping.

        Raises:
            ContractError: names the key, or file and line.
        """
        if self.text_field and self.messages_field:
            raise ContractError(f"{field}.messages_field", "text_field and messages_field exclude each other")
        mapping = FieldMapping(
            text_field=self.text_field,
            messages_field=self.messages_field,
            answer_field=self.answer_field,
            reward_field=self.reward_field,
            reward=self.reward,
            hook=load_message_format(message_format) if message_format else None,
            hook_name=message_format or "",
        )
        name = self.name or Path(self.path).stem
        return name, JsonlFile(self.path, f"{field}.path", self.start, self.stop), mapping


class EvaluationSet(PromptFile):
    """A set of prompts to evaluate on."""

    rollouts_per_prompt: int = Field(1, ge=1, description="rollouts per prompt: the k of pass@k")
    sampling: dict[str, Any] = Field({}, description="sampling parameters over the worker's own")

    @field_validator("sampling")
    @classmethod
    def _known(cls, value: dict[str, Any]) -> dict[str, Any]:
        sampling_params(value)
        return value


def sampling_params(values: dict[str, Any]) -> sample_pb2.SamplingParams:
    """Sampling parameters from a table.

    Raises:
        ContractError: an unknown name (with the nearest valid one) or a value of the wrong type or range.
    """
    valid = [field.name for field in sample_pb2.SamplingParams.DESCRIPTOR.fields]
    for name in values:
        if name not in valid:
            raise ContractError(f"sampling.{name}", nearest(name, valid, "sampling parameter"))
    try:
        params = json_format.ParseDict(values, sample_pb2.SamplingParams())
    except json_format.ParseError as error:
        raise ContractError("sampling", str(error)) from None
    validate_sampling(params, evaluation=True, override=True)
    return params


class BufferSettings(Settings):
    """The whole configuration."""

    database: str = Field("vime-buffer.db", description="path of a SQLite file, or a SQLAlchemy URL")
    blobs: str | None = Field(
        None, description='directory or fsspec URI of large payloads; "<database>.blobs" when absent; databases may share one'
    )
    lease_ttl_seconds: float = Field(60.0, gt=0, description="seconds after which a lease that is not renewed lapses")
    prompts: list[PromptFile] = Field([], description="data sets of prompts")
    evaluation: dict[str, EvaluationSet] = Field({}, description="evaluation sets by name")
    message_format: str | None = Field(None, description='"module:function" that makes a prompt of a row')
    group_filter: str = Field("none", description='"none", "nonzero_std" or "module:function"')
    max_failed_rollouts: int = Field(0, ge=0, description="failed rollouts of a group that is still trained on")
    inline_bytes: int = Field(262_144, ge=0, description="largest payload kept in the row; larger ones become files")
    trace_roots: list[str] = Field(
        [], description="directories or URIs below which samples may point at routing traces"
    )
    request_keep_seconds: float = Field(
        86_400.0, gt=0, description="seconds for which a repeated request gets its first answer"
    )
    blob_keep_seconds: float = Field(
        3_600.0, gt=0, description="seconds for which a blob waits for the commit that names it"
    )
    synchronous: Literal["normal", "full"] = Field("normal", description='SQLite: "full" also survives a loss of power')
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of the Prometheus endpoint on the loopback"
    )
    server: ServerSettings = ServerSettings()
    address_file: str | None = Field(None, description="file that the address is written to")
    exit_with_parent: bool = Field(False, description="end when the parent process ends")

    @field_validator("group_filter")
    @classmethod
    def _filter_exists(cls, value: str) -> str:
        load_group_filter(value)
        return value

    @property
    def blob_root(self) -> str:
        return self.blobs or f"{self.database}.blobs"

    def open_source(self) -> PromptSource:
        """The prompt source; its first rows are tried."""
        source = PromptSource(
            [one.open(f"prompts[{index}]", self.message_format) for index, one in enumerate(self.prompts)]
        )
        source.check()
        return source
