"""A copied database keeps its name: it must not take, and later delete, the payload files of the one it was copied from."""

import os
import shutil

import pytest

from vime_buffer import BufferServer, BufferSettings
from vime_proto.errors import ContractError


async def open_and_close(database, blobs):
    server = await BufferServer.start(BufferSettings(database=str(database), blobs=str(blobs)))
    await server.stop(0)


def claims(blobs):
    return {path: path.read_bytes() for path in blobs.glob("*/database.json")}


async def test_a_copy_beside_its_original_is_refused(tmp_path):
    first, copy, blobs = tmp_path / "a.db", tmp_path / "b.db", tmp_path / "blobs"
    await open_and_close(first, blobs)
    before = claims(blobs)
    shutil.copy(first, copy)
    with pytest.raises(
        ContractError, match=r"b\.db is a copy of a database whose files .*delete .*database\.json if .*a\.db"
    ):
        await open_and_close(copy, blobs)
    assert claims(blobs) == before and len(before) == 1
    await open_and_close(first, blobs)
    # What the message says helps: the other way, and the one.
    shutil.copytree(blobs, tmp_path / "more")
    next((tmp_path / "more").glob("*/database.json")).unlink()
    await open_and_close(copy, tmp_path / "more")
    next(blobs.glob("*/database.json")).unlink()
    await open_and_close(copy, blobs)


async def test_of_two_copies_elsewhere_the_last_opened_owns_the_files(tmp_path):
    first, blobs = tmp_path / "a.db", tmp_path / "blobs"
    await open_and_close(first, blobs)
    shutil.copy(first, tmp_path / "b.db")
    # As on another host, where the path of the first is of nothing.
    os.rename(first, tmp_path / "away.db")
    await open_and_close(tmp_path / "b.db", blobs)
    os.rename(tmp_path / "away.db", first)
    with pytest.raises(ContractError, match=r"a\.db belong to another copy of it .*b\.db"):
        await open_and_close(first, blobs)
    await open_and_close(tmp_path / "b.db", blobs)


async def test_moved_databases_roots_and_others_in_one_root_go_on(tmp_path):
    first, blobs = tmp_path / "a.db", tmp_path / "blobs"
    await open_and_close(first, blobs)
    await open_and_close(tmp_path / "other.db", blobs)
    os.rename(first, tmp_path / "moved.db")
    await open_and_close(tmp_path / "moved.db", blobs)
    os.rename(blobs, tmp_path / "root")
    await open_and_close(tmp_path / "moved.db", tmp_path / "root")
    assert len(claims(tmp_path / "root")) == 2


async def test_a_start_that_was_cut_off_between_database_and_root_can_be_repeated(tmp_path, monkeypatch):
    from vime_buffer._files import BlobFiles

    database, blobs = tmp_path / "a.db", tmp_path / "blobs"
    await open_and_close(database, blobs)
    os.rename(database, tmp_path / "b.db")
    for cut in ("before", "after"):
        write = BlobFiles.write_claim

        def die(self, data, write=write, cut=cut):
            if cut == "after":
                write(self, data)
            raise OSError("cut off")

        monkeypatch.setattr(BlobFiles, "write_claim", die)
        with pytest.raises(OSError, match="cut off"):
            await open_and_close(tmp_path / "b.db", blobs)
        monkeypatch.setattr(BlobFiles, "write_claim", write)
    await open_and_close(tmp_path / "b.db", blobs)


async def test_a_claim_that_cannot_be_read_is_named(tmp_path):
    await open_and_close(tmp_path / "a.db", tmp_path / "blobs")
    (path,) = claims(tmp_path / "blobs")
    path.write_text("{}")
    with pytest.raises(ContractError, match="does not say which database"):
        await open_and_close(tmp_path / "a.db", tmp_path / "blobs")
