"""Files and folders that appear whole or not at all, whatever kills the process."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PARTIAL", "new_directory", "sync", "write_text"]

PARTIAL = ".partial-"
"""Prefix of what is being written; left behind only by a killed process, never read."""


def sync(path: Path) -> None:
    """Flushes a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replaces a file's contents atomically."""
    temporary = path.with_name(f"{PARTIAL}{path.name}-{uuid.uuid4().hex[:8]}")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target` that becomes `target` when the block ends without an exception.

    A `target` that exists is replaced by two renames: a process killed in between leaves the old folder under the
    PARTIAL prefix and no `target`.
    """
    target = Path(target).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    made = target.with_name(f"{PARTIAL}{target.name}-{mark}")
    made.mkdir()
    try:
        yield made
        for path in sorted(made.rglob("*")):
            sync(path)
        sync(made)
        old = target.with_name(f"{PARTIAL}{target.name}-{mark}-old")
        if target.exists():
            os.rename(target, old)
        os.rename(made, target)
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
