"""One writer thread over SQLAlchemy: callers queue transactions, the thread commits those that wait together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine, make_url
from sqlalchemy.exc import SQLAlchemyError

from vime_buffer._store.schema import SCHEMA_VERSION, identity, metadata, schema_info
from vime_proto.errors import ContractError

Result = TypeVar("Result")
# Transactions that share one commit; more would only lengthen the wait of the first.
_MOST_JOINED = 64


class _JobError(Exception):
    """One operation of a round raised; its error is the cause."""


class DatabaseInUseError(OSError):
    """Another process holds the database: two buffers on one file would grant the same prompt twice."""


def chunks(items: Sequence[str], size: int = 500) -> Iterator[Sequence[str]]:
    """Parts of a list, each short enough for the parameters of one statement."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


@dataclasses.dataclass
class Transaction:
    """What an operation works on.

    Attributes:
        connection: inside an open transaction.
        now: seconds since the epoch by the lease clock.
        delete_after: files below the blob root to delete once the transaction is committed.
        changed: whether something happened that a waiting call may want to see.
    """

    connection: Connection
    now: float
    delete_after: list[str] = dataclasses.field(default_factory=list)
    changed: bool = False

    def execute(self, statement, parameters=None):
        return self.connection.execute(statement, parameters)


def database_url(database: str) -> str:
    """The SQLAlchemy URL of a path or URL."""
    return database if "://" in database else f"sqlite+pysqlite:///{Path(database).absolute()}"


def open_engine(url: str, synchronous: str = "normal", read_only: bool = False) -> Engine:
    """An engine whose SQLite connections use WAL and begin transactions where SQLAlchemy says so.

    Args:
        url: SQLAlchemy URL.
        synchronous: SQLite's ``synchronous``: "normal" survives the death of the process, "full" also a loss of power.
        read_only: begin deferred, so that readers never wait for the writer.
    """
    engine = sa.create_engine(url, pool_pre_ping=not url.startswith("sqlite"))
    if engine.dialect.name != "sqlite":
        return engine
    if make_url(url).database in (None, "", ":memory:"):
        raise ContractError("database", "an in-memory database does not survive anything; give a path")

    @sa.event.listens_for(engine, "connect")
    def connect(connection, _record):
        # pysqlite begins transactions by itself, and only before some statements; take that over.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA busy_timeout=30000")
        if not read_only:
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute(f"PRAGMA synchronous={synchronous}")
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def begin(connection):
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


class Database:
    """The rows. ``run`` is for the event loop, ``run_sync`` for start-up and tests, ``read`` for any thread.

    Args:
        database: path or SQLAlchemy URL.
        clock: seconds since the epoch for leases.
        delete_files: deletes files of collected payloads; called after the commit, in the writer thread.
        synchronous: see ``open_engine``.

    Attributes:
        url: SQLAlchemy URL.
        identity: 32 hexadecimal digits that no other database has but its copies.

    Raises:
        DatabaseInUseError: another process has it open (SQLite).
        ContractError: it was written by another version of this package.
    """

    def __init__(
        self,
        database: str,
        clock: Callable[[], float],
        delete_files: Callable[[list[str]], None] = lambda paths: None,
        synchronous: str = "normal",
    ):
        self._clock = clock
        self._delete_files = delete_files
        self.url = database_url(database)
        self._lock = _lock_file(self.url)
        try:
            self._engine = open_engine(self.url, synchronous)
            self._readers = open_engine(self.url, read_only=True)
            self._connection = self._engine.connect()
            self._create()
        except BaseException:
            os.close(self._lock) if self._lock is not None else None
            raise
        self._jobs: queue.SimpleQueue[tuple[Callable, Any] | None] = queue.SimpleQueue()
        self._at_hand: list[tuple[Callable, Any]] = []
        self._ended = False
        self._listeners: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._work, name="buffer-writer", daemon=True)
        self._thread.start()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` in the writer thread after each commit that a waiting call may want to see."""
        self._listeners.append(listener)

    async def run(self, operation: Callable[[Transaction], Result]) -> Result:
        """Runs ``operation`` in a transaction; what it raises undoes it and is raised here.

        It may be run twice, when another operation of the same round raised: it must have no effect but on the rows. The
        transaction is not cut off when the caller is cancelled.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def finish(result: Any, error: BaseException | None) -> None:
            def set_it() -> None:
                if not future.done():
                    future.set_exception(error) if error is not None else future.set_result(result)

            loop.call_soon_threadsafe(set_it)

        self._put((operation, finish))
        return await future

    def run_sync(self, operation: Callable[[Transaction], Result]) -> Result:
        """As ``run``, for threads."""
        done = threading.Event()
        outcome: list[Any] = [None, None]

        def finish(result: Any, error: BaseException | None) -> None:
            outcome[:] = result, error
            done.set()

        self._put((operation, finish))
        done.wait()
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def read(self, operation: Callable[[Transaction], Result]) -> Result:
        """Runs a read in the calling thread, on the last committed state."""
        with self._readers.connect() as connection, connection.begin():
            return operation(Transaction(connection, self._clock()))

    def close(self) -> None:
        """Finishes what is queued and lets the database go."""
        self._put(None)
        self._thread.join()
        self._connection.close()
        self._engine.dispose()
        self._readers.dispose()
        if self._lock is not None:
            os.close(self._lock)

    def _create(self) -> None:
        self.identity = uuid.uuid4().hex
        with self._connection.begin():
            metadata.create_all(self._connection)
            found = self._connection.execute(sa.select(schema_info.c.version)).scalar()
            if found is None:
                self._connection.execute(schema_info.insert().values(version=SCHEMA_VERSION))
            elif found != SCHEMA_VERSION:
                raise ContractError(
                    "database", f"{self.url} has schema {found}; this vime-buffer reads and writes {SCHEMA_VERSION}"
                )
            known = self._connection.execute(sa.select(identity.c.name)).scalar()
            if known is None:
                self._connection.execute(identity.insert().values(name=self.identity))
            else:
                self.identity = known

    def _work(self) -> None:
        try:
            self._serve()
        finally:
            # Nobody waits for ever for a writer that a fault of ours ended; the thread's own error is on stderr.
            self._ended = True
            self._refuse(self._at_hand)
            self._refuse_rest()

    @staticmethod
    def _refuse(jobs: Sequence[tuple[Callable, Any]]) -> None:
        for _, finish in jobs:
            finish(None, RuntimeError("the writer of the database has ended"))

    def _put(self, job: tuple[Callable, Any] | None) -> None:
        self._jobs.put(job)
        if self._ended:
            self._refuse_rest()

    def _refuse_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                self._refuse([job] if job is not None else [])

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            joined = [job]
            last = False
            while len(joined) < _MOST_JOINED:
                try:
                    more = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    last = True
                    break
                joined.append(more)
            self._at_hand = joined
            self._commit(joined)
            self._at_hand = []
            if last:
                return

    def _commit(self, jobs: list[tuple[Callable, Any]]) -> None:
        """Commits jobs together. One that raises undoes the round, which is then repeated with each job apart."""
        try:
            try:
                outcomes, delete, changed = self._round(jobs, apart=False)
            except (_JobError, SQLAlchemyError):
                outcomes, delete, changed = self._round(jobs, apart=True)
        except SQLAlchemyError as error:
            # The commit itself failed: nothing of this round happened.
            outcomes, delete, changed = [(None, error)] * len(jobs), [], False
        for (_, finish), (result, error) in zip(jobs, outcomes, strict=True):
            finish(result, error)
        if changed:
            for listener in self._listeners:
                listener()
        if delete:
            self._delete_files(delete)

    def _round(self, jobs: list[tuple[Callable, Any]], apart: bool):
        outcomes: list[tuple[Any, BaseException | None]] = []
        delete: list[str] = []
        changed = False
        with self._connection.begin():
            for operation, _ in jobs:
                transaction = Transaction(self._connection, self._clock())
                try:
                    with self._connection.begin_nested() if apart else contextlib.nullcontext():
                        outcomes.append((operation(transaction), None))
                except Exception as error:
                    if not apart:
                        raise _JobError from error
                    outcomes.append((None, error))
                    continue
                delete += transaction.delete_after
                changed = changed or transaction.changed
        return outcomes, delete, changed


def _lock_file(url: str) -> int | None:
    parsed = make_url(url)
    if not parsed.drivername.startswith("sqlite") or parsed.database in (None, "", ":memory:"):
        return None
    path = Path(parsed.database)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ContractError("database", f"cannot write {path}: {error.strerror}") from None
    try:
        # Released by the kernel however the process ends.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise DatabaseInUseError(f"database {path} is in use by another vime-buffer process") from None
    return handle
