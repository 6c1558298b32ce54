"""The recipe: which stages a run has, how each is started, and what is passed to it."""

from __future__ import annotations

import os
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vime_proto.channel import split_address
from vime_proto.errors import ContractError, nearest
from vime_proto.settings import merge

# In the order in which they start.
STAGES = ("buffer", "router", "engine", "worker", "trainer")
SERVERS = ("buffer", "router", "engine", "trainer")
COMMANDS = {
    "buffer": ("-m", "vime_buffer", "serve"),
    "router": ("-m", "vime_router", "serve"),
    "engine": ("-m", "vime_rollout", "engine"),
    "worker": ("-m", "vime_rollout", "worker"),
    "trainer": ("-m", "vime_trainer", "rl"),
}


class RecipeError(ValueError):
    """A recipe that cannot be run; the text has one line per fault."""


class Table(BaseModel):
    """A table of the recipe. Frozen; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Stage(Table):
    """How a stage's processes are started, or where they run already."""

    python: str | None = Field(None, description="interpreter whose environment holds the stage")
    command: list[str] | None = Field(None, description="command instead of the interpreter's; --config FILE is added")
    address: list[str] = Field([], description="host:port of running processes, instead of starting any")
    count: int = Field(1, ge=0, description="processes; above 1 for engine and worker only")
    restart: int = Field(0, ge=0, description="times that a process may die and be started again (worker, engine)")
    cpus: float = Field(0, ge=0, description="CPU cores that Ray sets aside for each process")
    gpus: int = Field(0, ge=0, description="GPUs of each process, or of each rank")
    ranks: int = Field(1, ge=1, description="ranks that the trainer's process starts on its host (trainer)")
    start_seconds: float = Field(1800, gt=0, description="seconds within which a process must serve")
    env: dict[str, str] = Field({}, description="entries of the environment, beside the host's own")
    config: dict[str, Any] = Field({}, description="the stage's own configuration; the launcher adds addresses, run and folders")

    @field_validator("command", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return shlex.split(value) if isinstance(value, str) else value

    @field_validator("address", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("address")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        for one in value:
            try:
                split_address(one)
            except ContractError as error:
                raise ValueError(str(error)) from None
        return value

    @model_validator(mode="after")
    def _one_way(self) -> Stage:
        given = [name for name in ("python", "command", "address") if getattr(self, name)]
        if "address" in given and len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: a stage is started or it runs at an address")
        if self.address and self.restart:
            raise ValueError("restart needs a process that the launcher starts, not an address")
        return self


class RayTable(Table):
    """The Ray cluster."""

    address: str | None = Field(None, description="a running cluster; absent starts one on this host")
    cpus: int = Field(2, ge=1, description="cores of a cluster started here")
    gpus: int | None = Field(None, ge=0, description="GPUs of a cluster started here; absent asks the host")
    object_store_mib: int = Field(80, ge=75, description="MiB of a started cluster's object store")


class Export(Table):
    """Rollout only: batches are written to a folder instead of being trained."""

    batches: int = Field(1, ge=1, description="batches to write")
    batch_groups: int = Field(..., ge=1, description="groups in a batch")
    group_size: int = Field(..., ge=1, description="rollouts in a group")
    seed: int = Field(0, ge=0, description="order of the prompts")
    path: str = Field("export", description="folder to write, within the run folder unless absolute")


class Recipe(Table):
    """A whole run."""

    name: str = Field(..., pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the run, and its folder's name")
    runs_dir: str = Field("runs", description="where run folders are made")
    stop_seconds: float = Field(4.0, gt=0, le=8, description="seconds that a stage has to end by itself")
    ray: RayTable = RayTable()
    buffer: Stage | None = None
    router: Stage | None = None
    engine: Stage | None = None
    worker: Stage | None = None
    trainer: Stage | None = None
    export_batches: Export | None = None

    @property
    def mode(self) -> str:
        """``train``, ``rollout-only`` (``[export_batches]``) or ``train-only`` (``trainer.config.import_batches``)."""
        if self.export_batches:
            return "rollout-only"
        return "train-only" if self.trainer and "import_batches" in self.trainer.config else "train"

    def stages(self) -> dict[str, Stage]:
        """The stages that the recipe has, in the order of their start."""
        return {name: stage for name in STAGES if (stage := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _whole(self) -> Recipe:
        need = {
            "train": ("buffer", "engine", "worker", "trainer"),
            "rollout-only": ("buffer", "engine", "worker"),
            "train-only": ("trainer",),
        }[self.mode]
        present = self.stages()
        # A router that runs elsewhere has its own engines.
        covered = {"engine"} if self.router and self.router.address else set()
        missing = [name for name in need if name not in present and name not in covered]
        if missing:
            hint = "; a run without a trainer needs [export_batches]" if missing == ["trainer"] else ""
            raise ValueError(f"a {self.mode} run needs [{'], ['.join(missing)}]{hint}")
        if self.mode != "train":
            extra = {"rollout-only": ("trainer",), "train-only": ("buffer", "router", "engine", "worker")}[self.mode]
            found = [name for name in extra if name in present]
            if found:
                raise ValueError(f"a {self.mode} run has no [{'], ['.join(found)}]")
        if self.mode == "train" and self.router is None:
            raise ValueError("[router] is missing: the trainer finds the engines there")
        for name, stage in present.items():
            if stage.ranks != 1 and (name != "trainer" or stage.address):
                raise ValueError(f"{name}.ranks: only a trainer that is started here has ranks")
            if name not in ("engine", "worker"):
                if stage.count != 1 or len(stage.address) > 1:
                    raise ValueError(f"{name}: count must be 1")
                if stage.restart:
                    raise ValueError(f"{name}.restart: only worker and engine can be started again within a run")
        if self.worker and self.worker.address:
            raise ValueError("worker.address: a worker serves nothing; count = 0 says that workers are started elsewhere")
        if self.router is None and self.engine and (len(self.engine.address) or self.engine.count) != 1:
            raise ValueError("engine: without a [router] there is exactly one engine")
        return self


def load_recipe(path: str | os.PathLike[str], sets: Sequence[str] = (), pythons: Mapping[str, str] = {}) -> Recipe:
    """Reads a recipe.

    Args:
        path: the TOML file.
        sets: ``a.b=c`` each, laid on top; c is read as TOML where it can be, else as text.
        pythons: interpreter by stage, before that of the recipe. A stage that has neither takes ``VIME_PYTHON_<STAGE>`` of the
            environment, else the launcher's own.

    Raises:
        RecipeError: a file, key or value that is wrong, with the nearest valid name.
    """
    try:
        values = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: not TOML: {error}") from None
    for one in sets:
        values = merge(values, _set(one))
    for stage in STAGES:
        table = values.get(stage)
        if not isinstance(table, dict) or table.get("address"):
            continue
        if stage in pythons:
            table = {**{k: v for k, v in table.items() if k != "command"}, "python": pythons[stage]}
        elif not (table.get("python") or table.get("command")):
            table = {**table, "python": os.environ.get(f"VIME_PYTHON_{stage.upper()}") or sys.executable}
        values = {**values, stage: table}
    return check_recipe(values, str(path))


def check_recipe(values: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """The recipe of these values.

    Raises:
        RecipeError: as ``load_recipe``.
    """
    try:
        return Recipe(**values)
    except ValidationError as error:
        raise RecipeError("\n".join(f"{where}: {_explain(one)}" for one in error.errors())) from None


def _set(text: str) -> dict[str, Any]:
    name, equals, value = text.partition("=")
    keys = name.split(".")
    if not equals or not all(keys):
        raise RecipeError(f"--set {text}: not of the form a.b=c")
    try:
        result: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        result = value
    for key in reversed(keys):
        result = {key: result}
    return result


def _explain(error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        model: type[BaseModel] = Recipe
        for part in path[:-1]:
            model = _TABLES.get(part, model)
        return f"{'.'.join(path)}: {nearest(path[-1], model.model_fields, 'key')}"
    message = error["msg"].removeprefix("Value error, ")
    if not path:
        return message
    given = "" if error["type"] in ("value_error", "missing") else f" (got {error['input']!r})"
    return f"{'.'.join(path)}: {message}{given}"


_TABLES: dict[str, type[BaseModel]] = {
    **{name: Stage for name in STAGES},
    "ray": RayTable,
    "export_batches": Export,
}
