"""Configuration of ``vime-router serve``."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from vime_proto.channel import split_address
from vime_proto.errors import nearest
from vime_proto.settings import Section, ServerSettings, Settings
from vime_router.policies import policy_names


class EngineSettings(Section):
    """An engine known from the start; others register themselves."""

    id: str = Field(min_length=1, description="unique within the fleet")
    address: str = Field(description="host:port of the engine")

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if split_address(value)[1] == 0:
            raise ValueError(f"needs a port, got {value!r}")
        return value


class EngineTls(Section):
    """How engines are called; plain unless a file is named."""

    ca: str | None = Field(None, description="PEM file of the authority that signed the engines' certificates")
    certificate: str | None = Field(None, description="PEM file shown to engines that ask for one")
    key: str | None = Field(None, description="PEM file of its key")


class HealthSettings(Section):
    """When an engine counts as healthy."""

    interval_seconds: float = Field(1.0, gt=0, description="seconds between two checks of an engine")
    queued_interval_seconds: float = Field(
        0.1, gt=0, description="seconds between two checks while requests wait for an engine"
    )
    timeout_seconds: float = Field(5.0, gt=0, description="seconds that a check may take")
    unhealthy_after: int = Field(3, ge=1, description="failed checks in a row after which it gets nothing")
    healthy_after: int = Field(1, ge=1, description="good checks in a row after which it gets requests again")


class RouterSettings(Settings):
    """The whole configuration of the router."""

    policy: str = Field("least_outstanding_tokens", description="which engine gets a request")
    engines: list[EngineSettings] = Field([], description="engines known from the start")
    queue_timeout_seconds: float = Field(600.0, gt=0, description="longest wait of a request for an engine")
    queue_limit: int = Field(65536, ge=1, description="most requests that wait for an engine")
    max_attempts: int = Field(3, ge=1, description="engines tried for a request before its first token")
    health: HealthSettings = HealthSettings()
    engine_token_file: str | None = Field(None, description="file with the bearer token that the engines ask for")
    engine_tls: EngineTls = EngineTls()
    seed: int | None = Field(None, description="seed of the policies' randomness; absent takes the system's")
    server: ServerSettings = ServerSettings()
    metrics_port: int | None = Field(None, ge=0, le=65535, description="port of the Prometheus endpoint; absent is off")
    address_file: str | None = Field(None, description="file that receives host:port once bound")
    exit_with_parent: bool = Field(False, description="end when the parent process ends")

    @field_validator("policy")
    @classmethod
    def _is_policy(cls, value: str) -> str:
        if value not in policy_names():
            raise ValueError(nearest(value, policy_names(), "policy"))
        return value

    @model_validator(mode="after")
    def _ids_differ(self) -> RouterSettings:
        ids = [engine.id for engine in self.engines]
        twice = sorted({one for one in ids if ids.count(one) > 1})
        if twice:
            raise ValueError(f"engines: ids must differ, these are given twice: {', '.join(twice)}")
        return self
