"""Lineages of a run, kept beside its checkpoints: every restore opens the next one."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vime_proto.common.v1 import common_pb2 as common
from vime_trainer.files import write_text

_FILE = "lineages.json"


@dataclass(frozen=True)
class LineageRecord:
    """One line of training history.

    Attributes:
        ordinal: counted from 0.
        parent, forked_at: lineage and batch that it was restored from; None for the first.
        salt: tells it from lineages of the same number in runs that had the same name.
    """

    ordinal: int
    parent: int | None = None
    forked_at: int | None = None
    salt: str = field(default="", compare=False)

    def message(self) -> common.Lineage:
        """As the contract has it."""
        return common.Lineage(ordinal=self.ordinal, parent=self.parent, forked_at=self.forked_at)


def read_lineages(output: Path, run_id: str) -> list[LineageRecord]:
    """Lineages of the run in `output`, in order; empty when it never started.

    Raises:
        ValueError: the folder belongs to another run, or the file holds something else.
    """
    path = output / _FILE
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text())
        owner, lineages = content["run_id"], [LineageRecord(**entry) for entry in content["lineages"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: not a list of lineages: {error!r}") from error
    if owner != run_id:
        raise ValueError(f"output: {output} holds run {owner!r}, not {run_id!r}; choose another folder or run_id")
    return lineages


def open_lineage(output: Path, run_id: str, restored: tuple[int, int] | None) -> LineageRecord:
    """The lineage that this process trains, written down before anybody else hears of it.

    Args:
        restored: lineage and batch of the checkpoint that was restored; None starts from the model as it was given.
    """
    known = read_lineages(output, run_id)
    salt = uuid.uuid4().hex[:8]
    if not known and restored is None:
        record = LineageRecord(0, salt=salt)
    else:
        parent, forked_at = restored if restored is not None else (known[0].ordinal, 0)
        ordinal = max([parent, *(one.ordinal for one in known)]) + 1
        record = LineageRecord(ordinal, parent, forked_at, salt)
    output.mkdir(parents=True, exist_ok=True)
    content = {"run_id": run_id, "lineages": [asdict(one) for one in [*known, record]]}
    write_text(output / _FILE, json.dumps(content, indent=1) + "\n")
    return record
