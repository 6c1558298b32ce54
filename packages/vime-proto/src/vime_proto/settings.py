"""Configuration and command lines of a stage: typed, from a TOML file and dotted options, unknown keys refused.

Needs the extra ``vime-proto[settings]``. Environment variables are not read: a process is what its configuration says.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from vime_proto.channel import split_address
from vime_proto.errors import ContractError, nearest
from vime_proto.server import ServerOptions, read_file

SettingsType = TypeVar("SettingsType", bound="Settings")


class Section(BaseModel):
    """A table of the configuration. Frozen; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Settings(BaseSettings):
    """The whole configuration of a command. Frozen; unknown keys are refused; only explicit sources count."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **others: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class ServerSettings(Section):
    """Where and how a server listens."""

    address: str = Field("127.0.0.1:0", description="host:port; port 0 takes a free one; IPv6 hosts in brackets")
    max_message_mib: int = Field(256, ge=1, description="most MiB of one message")
    tls_certificate: str | None = Field(None, description="PEM file")
    tls_key: str | None = Field(None, description="PEM file")
    tls_client_ca: str | None = Field(None, description="PEM file; clients must show a certificate that it signed")
    token_file: str | None = Field(None, description="file with the bearer token that clients must send")

    def options(self) -> ServerOptions:
        """The server's options.

        Raises:
            ContractError: an address of another form.
            OSError: a token file that cannot be read; names the key.
        """
        try:
            split_address(self.address)
        except ContractError as error:
            raise error.under("server") from None
        return ServerOptions(
            address=self.address,
            max_message_bytes=self.max_message_mib << 20,
            tls_certificate=self.tls_certificate,
            tls_key=self.tls_key,
            tls_client_ca=self.tls_client_ca,
            token=read_file("server.token_file", self.token_file).decode().strip() if self.token_file else None,
        )


def load(settings: type[SettingsType], argv: Sequence[str], prog: str) -> SettingsType:
    """The configuration of a command: defaults, then ``--config FILE.toml``, then ``--dotted.key value``.

    ``--help`` prints every key; ``--print-config`` prints the resolved configuration as JSON; both exit with 0. Values of
    options are read as TOML where they can be (``3``, ``true``, ``[1, 2]``, ``{a = 1}``), else as text. Dashes and
    underscores are the same in option names. A wrong file, key or value prints one line per fault and exits with 2.
    """
    values, print_config = _parse(settings, list(argv), prog)
    try:
        resolved = settings(**values)
    except ValidationError as error:
        _fail(prog, [_explain(settings, one) for one in error.errors()])
    except ValueError as error:
        _fail(prog, [str(error)])
    if print_config:
        print(resolved.model_dump_json(indent=2))
        raise SystemExit(0)
    return resolved


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` laid on top, table by table; neither is changed."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge(result[key], value) if both else value
    return result


def _parse(settings: type[Settings], argv: list[str], prog: str) -> tuple[dict[str, Any], bool]:
    files: dict[str, Any] = {}
    options: dict[str, Any] = {}
    print_config = False
    rest = iter(argv)
    for word in rest:
        if word in ("-h", "--help"):
            print(_help(settings, prog))
            raise SystemExit(0)
        if word == "--print-config":
            print_config = True
            continue
        if not word.startswith("--") or word == "--":
            _fail(prog, [f"unexpected argument {word!r}; options are --key value"])
        name, equals, text = word[2:].partition("=")
        path = name.replace("-", "_").split(".")
        if not equals:
            text = next(rest, None) if not _is_flag(settings, path) else "true"
            if text is None:
                _fail(prog, [f"--{name} needs a value"])
        if path == ["config"]:
            files = merge(files, _read(text, prog))
        else:
            target = options
            for key in path[:-1]:
                target = target.setdefault(key, {})
            target[path[-1]] = _value(settings, path, text)
    return merge(files, options), print_config


def _read(path: str, prog: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        _fail(prog, [f"--config {path}: {error.strerror}"])
    except tomllib.TOMLDecodeError as error:
        _fail(prog, [f"--config {path}: not TOML: {error}"])


def _value(settings: type[Settings], path: list[str], text: str) -> Any:
    field = _find(settings, path)
    if field is not None and str in _choices(field.annotation):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The types a value may have: those of a union, else the one type."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _model(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _find(model: type[BaseModel], path: Sequence[str]):
    """The field at a dotted path; None when there is none."""
    field = model.model_fields.get(path[0])
    for key in path[1:]:
        inner = _model(field.annotation) if field is not None else None
        field = inner.model_fields.get(key) if inner is not None else None
    return field


def _is_flag(settings: type[Settings], path: list[str]) -> bool:
    # "--flag" alone means true; "--flag=false" turns a default of true off.
    field = _find(settings, path)
    return field is not None and field.annotation is bool


def _explain(settings: type[BaseModel], error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    where = ".".join(path) or "configuration"
    if error["type"] != "extra_forbidden":
        own = error["type"] == "value_error"
        message = error["msg"].removeprefix("Value error, ")
        # Our own texts say what was given; tables are too long to repeat.
        shown = "" if own or isinstance(error["input"], dict) else f" (got {error['input']!r})"
        return f"{where}: {message}{shown}" if path else message
    model: type[BaseModel] | None = settings
    for part in path[:-1]:
        field = model.model_fields.get(part) if model is not None else None
        model = _model(field.annotation) if field is not None else model
    return f"{where}: {nearest(path[-1], model.model_fields if model else (), 'key')}"


def _help(settings: type[BaseModel], prog: str) -> str:
    lines = [f"usage: {prog} [--config FILE.toml] [--print-config] [--key value ...]", "", "keys:"]

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            inner = _model(field.annotation)
            if inner is not None and "dict" not in str(field.annotation) and "list" not in str(field.annotation):
                walk(inner, f"{prefix}{name}.")
                continue
            default = (
                "required"
                if field.is_required()
                else json.dumps(field.get_default(call_default_factory=True), default=str)
            )
            lines.append(f"  --{prefix}{name}  [{default}]  {field.description or ''}".rstrip())

    walk(settings, "")
    return "\n".join(lines)


def _fail(prog: str, faults: Sequence[str]) -> NoReturn:
    for fault in faults:
        print(f"{prog}: {fault}", file=sys.stderr)
    raise SystemExit(2)
