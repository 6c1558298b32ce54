"""All ranks write into a hidden folder; the first one gives it its name when all of it is on disk."""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vime_trainer.checkpoint._communicator import Communicator, exchange
from vime_trainer.checkpoint._file import checksum_of, write_tensors
from vime_trainer.checkpoint._folders import FORMAT, STATE, TENSORS, path_of, prune
from vime_trainer.checkpoint._manifest import merge
from vime_trainer.checkpoint._snapshot import Snapshot
from vime_trainer.files import PARTIAL, make_folder, publish_folder, sync

__all__ = ["commit"]


def commit(root: str | Path, step: int, snapshot: Snapshot | Exception, keep: int | None, ranks: Communicator) -> Path:
    """Writes a checkpoint together with all other ranks; returns once it is visible under its name.

    Args:
        root: folder of the run's checkpoints, on a file system that all ranks share; made when missing.
        step: of the run.
        snapshot: this rank's part, or why there is none; then no rank writes.
        keep: the first rank removes all but the newest so many afterwards.
        ranks: who writes.

    Raises:
        CheckpointError: a rank failed; all ranks raise and nothing has become visible.
    """
    target = path_of(Path(root).absolute(), step)
    folder = target.with_name(f"{PARTIAL}{target.name}-{uuid.uuid4().hex[:8]}")
    try:
        with _caught() as caught:
            if isinstance(snapshot, Exception):
                raise snapshot
            if ranks.rank == 0:
                make_folder(target.parent)
                make_folder(folder)
        answers = exchange(ranks, {"folder": folder.name}, caught.error)
        folder = target.with_name(answers[0]["folder"])
        with _caught() as caught:
            # On another host the folder may not show yet, or show and be reported as missing.
            make_folder(folder)
            written = {file: write_tensors(folder / file, tensors) for file, tensors in snapshot.files.items()}
            sync(folder)
            mine = {
                "files": written,
                "listed": snapshot.listed,
                "names": snapshot.names,
                "random": snapshot.random,
            }
        answers = exchange(ranks, {} if caught.error is not None else mine, caught.error)
        with _caught() as caught:
            if ranks.rank == 0:
                _publish(folder, target, snapshot, answers)
                if keep is not None:
                    prune(root, keep)
        exchange(ranks, {}, caught.error)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return target


def _publish(folder: Path, target: Path, snapshot: Snapshot, answers: list[dict[str, Any]]) -> None:
    files = {file: entry for answer in answers for file, entry in answer["files"].items()}
    for rank, answer in enumerate(answers):
        for file, entry in answer["files"].items():
            path = folder / file
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise OSError(
                    f"{path}: written by rank {rank}, but not seen by rank 0; do all ranks share this folder?"
                )
    tensors = folder / TENSORS
    names = sorted({name for answer in answers for name in answer["names"]})
    manifest = merge([answer["listed"] for answer in answers], names)
    tensors.write_text(json.dumps(manifest) + "\n", encoding="utf-8")
    files[TENSORS] = {"bytes": tensors.stat().st_size, "xxh3_64": checksum_of(tensors)}
    content = {
        "format": FORMAT,
        "ranks": len(answers),
        **snapshot.content,
        "random": [answer["random"] for answer in answers],
        "files": files,
    }
    (folder / STATE).write_text(json.dumps(content) + "\n", encoding="utf-8")
    for path in (tensors, folder / STATE):
        sync(path)
    publish_folder(folder, target)


class _Caught:
    error: Exception | None = None


@contextlib.contextmanager
def _caught() -> Iterator[_Caught]:
    """Keeps an exception for the exchange in which all ranks learn of it."""
    caught = _Caught()
    try:
        yield caught
    except Exception as error:
        caught.error = error
