"""Writers of metrics: a JSON line a step, TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from vime_trainer.settings.metrics import MetricsSettings


class Writer(Protocol):
    """Takes the figures of one step."""

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Writes them so that they survive a crash of this process right after."""

    def close(self) -> None:
        """Ends it."""


class JsonlWriter:
    """One JSON object a line: {"step": 3, "time": ..., "<name>": <value>, ...}. A half line of a killed process is
    dropped when the file is opened again."""

    def __init__(self, path: Path, labels: Mapping[str, Any] | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        self._labels = dict(labels or {})
        _drop_half_line(self._file)

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        line = json.dumps({"step": step, "time": time, **self._labels, **values})
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def _drop_half_line(file) -> None:
    size = file.seek(0, os.SEEK_END)
    at = size
    while at > 0:
        block = min(4096, at)
        file.seek(at - block)
        newline = file.read(block).rfind(b"\n")
        if newline >= 0:
            file.truncate(at - block + newline + 1)
            break
        at -= block
    else:
        file.truncate(0)
    file.seek(0, os.SEEK_END)


class TensorBoardWriter:
    """Scalars for TensorBoard."""

    def __init__(self, path: Path):
        # Imported here: it takes a second, and tests of the loop do without.
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(path))

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Weights & Biases.

    Raises:
        ImportError: the extra is not installed; says how to.
    """

    def __init__(self, settings, run_id: str, config: Mapping[str, Any]):
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ImportError("metrics.wandb needs the extra: pip install 'vime-trainer[wandb]'") from error
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            mode=settings.mode,
            name=run_id,
            config=dict(config),
        )
        # Its own count of steps only rises, and drops what comes late: the result of an evaluation beside training.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


def open_writers(
    settings: MetricsSettings, output: Path, run_id: str, config: Mapping[str, Any], labels: Mapping[str, Any]
) -> list[Writer]:
    """The writers that the configuration asks for.

    Args:
        output: the run's folder.
        run_id: the run.
        config: the resolved configuration, for those that keep it.
        labels: keys added to each JSON line, such as the lineage.
    """
    writers: list[Writer] = []
    if settings.jsonl:
        writers.append(JsonlWriter(output / "metrics.jsonl", labels))
    if settings.tensorboard:
        writers.append(TensorBoardWriter(output / "tensorboard"))
    if settings.wandb is not None:
        writers.append(WandbWriter(settings.wandb, run_id, config))
    return writers
