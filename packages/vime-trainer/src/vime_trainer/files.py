"""Files and folders that appear whole or not at all, whatever kills the process."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PARTIAL", "make_folder", "new_directory", "publish_folder", "sync", "write_text"]

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


def make_folder(path: Path) -> None:
    """Makes a folder and its parents unless it is there; several hosts may do so at once.

    A parallel file system may refuse to make what it does not list yet, so neither its listing nor its refusal decides:
    the first file that goes into the folder does.
    """
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            with contextlib.suppress(FileExistsError):
                folder.mkdir()


def publish_folder(made: Path, target: Path) -> None:
    """Gives a finished folder its name. Its files must be on disk; its entries are flushed here.

    A `target` that exists is replaced by two renames: a process killed in between leaves the old folder under the
    PARTIAL prefix and no `target`.
    """
    sync(made)
    old = target.with_name(f"{PARTIAL}{target.name}-{uuid.uuid4().hex[:8]}-old")
    if target.exists():
        os.rename(target, old)
    os.rename(made, target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target` that becomes `target` when the block ends without an exception.

    See `publish_folder` for a `target` that exists.
    """
    target = Path(target).absolute()
    make_folder(target.parent)
    made = target.with_name(f"{PARTIAL}{target.name}-{uuid.uuid4().hex[:8]}")
    made.mkdir()
    try:
        yield made
        for path in sorted(made.rglob("*")):
            sync(path)
        publish_folder(made, target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
