"""From a recipe to processes: command, configuration and files of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime_launch import toml
from vime_launch.recipe import COMMANDS, SERVERS, Recipe, Stage
from vime_proto.settings import merge

# Stands for an address that is not known before its process runs.
UNKNOWN = "127.0.0.1:0"


class RunFolder:
    """The files of a run. On several hosts the folder must be on storage that they share."""

    def __init__(self, path: Path):
        self.path = path.absolute()

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def config(self, process: str) -> Path:
        return self.path / "stages" / f"{process}.toml"

    def log(self, process: str) -> Path:
        return self.path / "logs" / f"{process}.log"

    def address(self, process: str) -> Path:
        return self.path / "addresses" / process

    def make(self) -> None:
        for name in ("stages", "logs", "addresses"):
            (self.path / name).mkdir(parents=True, exist_ok=True)


@dataclass
class Process:
    """One process of a run, started here or running at an address.

    Attributes:
        stated: what the recipe says of its configuration.
        config: the same over what the launcher adds, but for addresses of others.
    """

    name: str
    kind: str
    index: int
    stage: Stage
    command: list[str]
    config: dict[str, Any] = field(default_factory=dict)
    stated: dict[str, Any] = field(default_factory=dict)
    address: str | None = None

    @property
    def external(self) -> bool:
        return bool(self.stage.address)

    @property
    def serves(self) -> bool:
        return self.kind in SERVERS


def processes(recipe: Recipe, folder: RunFolder) -> list[Process]:
    """The processes of a run in the order of their start, configured but for the addresses of others."""
    found = []
    for kind, stage in recipe.stages().items():
        count = len(stage.address) or stage.count
        for index in range(count):
            name = f"{kind}-{index}" if kind in ("engine", "worker") else kind
            process = Process(name, kind, index, stage, command(stage, kind))
            if stage.address:
                process.address = stage.address[index]
            else:
                process.stated = fill(stage.config, folder)
                process.config = merge(_own(process, recipe, folder), process.stated)
            found.append(process)
    return found


def fill(value: Any, folder: RunFolder) -> Any:
    """``value`` with ``${run}`` in its texts replaced by the run folder."""
    if isinstance(value, str):
        return value.replace("${run}", str(folder.path))
    if isinstance(value, Mapping):
        return {key: fill(one, folder) for key, one in value.items()}
    if isinstance(value, list):
        return [fill(one, folder) for one in value]
    return value


def command(stage: Stage, kind: str) -> list[str]:
    """What starts a process of the stage, without ``--config``."""
    words = list(stage.command) if stage.command else [stage.python or "", *COMMANDS[kind]]
    return words if stage.ranks == 1 else [*words, "--ranks", str(stage.ranks)]


def _own(process: Process, recipe: Recipe, folder: RunFolder) -> dict[str, Any]:
    """What the launcher knows of a stage's configuration before anything runs; the recipe's own entries come over it."""
    config: dict[str, Any] = {"exit_with_parent": True}
    if process.serves:
        config |= {"address_file": str(folder.address(process.name)), "server": {"address": UNKNOWN}}
    if process.kind != "router" and process.kind != "buffer":
        config["run_id"] = recipe.name
    if process.kind == "buffer":
        config |= {"database": str(folder / "buffer/buffer.db"), "blobs": str(folder / "buffer/blobs")}
    elif process.kind == "engine":
        config |= {"engine_id": process.name, "file_root": str(folder / "weights")}
        if process.stage.count > 1:
            # Engines of one seed would draw the same numbers for requests that have no seed of their own.
            config["seed"] = process.index
    elif process.kind == "worker":
        config["worker_id"] = process.name
    elif process.kind == "trainer":
        # A run can be over before this launcher, on a busy host, has asked for the first figures.
        config |= {"output": str(folder / "trainer"), "metrics_wait_seconds": 10.0}
    return config


def connect(process: Process, known: Sequence[Process], host: str | None = None) -> dict[str, Any]:
    """The whole configuration of a process, now that others have addresses.

    Args:
        known: the processes with their addresses; one without stands as ``UNKNOWN``, which is good enough to check a recipe.
        host: the host to listen on, where stages are on several hosts; None keeps to loopback.
    """
    at: Mapping[str, list[Process]] = {kind: [p for p in known if p.kind == kind] for kind in SERVERS}
    first = {kind: (found[0].address or UNKNOWN) for kind, found in at.items() if found}
    given: dict[str, Any] = {}
    if process.kind == "router":
        engines = [{"id": p.name, "address": p.address} for p in at["engine"] if p.external]
        if engines:
            given["engines"] = engines
    elif process.kind == "engine":
        given |= {"router": first["router"]} if "router" in first else {}
        # Known from an engine's second life on, or when the trainer runs elsewhere: the weights that it missed are there.
        if at["trainer"] and at["trainer"][0].address:
            given["weights"] = at["trainer"][0].address
    elif process.kind == "worker":
        given |= {"buffer": first["buffer"], "rollout": first.get("router") or first["engine"]}
    elif process.kind == "trainer":
        given |= {name: first[name] for name in ("buffer", "router") if name in first}
    if process.address and not process.external:
        # It ran before: others know it there.
        given["server"] = {"address": process.address}
    elif host and process.serves:
        given["server"] = {"address": f"[{host}]:0" if ":" in host else f"{host}:0"}
    # What a recipe states about itself holds; addresses come from the launcher only where it says nothing.
    return merge(merge(process.config, given), process.stated)


def write_config(process: Process, config: Mapping[str, Any], folder: RunFolder) -> list[str]:
    """Writes the stage's TOML file; answers the command that starts the process."""
    path = folder.config(process.name)
    path.write_text(toml.dumps(config))
    return [*process.command, "--config", str(path)]
