"""The ranks of a run, as one of them sees them: orders of the leader, common decisions, figures of all."""

from __future__ import annotations

import contextlib
import json
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vime_trainer.batch import RefusedSamplesError
from vime_trainer.ranks import lost_rank

from ._io import Interrupted

_HEADER = struct.Struct("<I")


class RankLostError(RuntimeError):
    """Another rank ended, or does not answer."""


class Team:
    """Everything that ranks say to one another besides what the model's own layers do. Bytes are JSON or protobuf.

    A process alone is a team of one, to which nothing is ever sent.

    Args:
        parallel: a `vime_trainer.megatron.Parallel`; None for a process alone.
        interrupt: set when this process was asked to end.

    Attributes:
        rank, size: of this process; rank 0 leads.
        data_rank, data_size: samples are spread over these.
        is_last_stage: whether log-probs appear here.
    """

    def __init__(self, parallel: Any = None, interrupt: threading.Event | None = None):
        self._parallel = parallel if parallel is not None and parallel.world > 1 else None
        self.interrupt = interrupt or threading.Event()
        several = self._parallel is not None
        self.rank: int = parallel.rank if several else 0
        self.size: int = parallel.world if several else 1
        self.data_rank: int = parallel.data_rank if several else 0
        self.data_size: int = parallel.data_size if several else 1
        self.is_last_stage: bool = parallel.is_last_stage if several else True
        self._listening = False

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides, and talks to the other stages."""
        return self.rank == 0

    # Orders --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self, order: str, data: bytes = b"", **details: Any) -> Iterator[None]:
        """What the leader does in here, the others do as well: see `receive`.

        Raises:
            Interrupted: some rank was asked to end; all of them get this.
        """
        self._tell(order, data, details)
        self._listening = False
        try:
            yield
        except RefusedSamplesError:
            # All ranks raised it, and go on.
            self.begin()
            raise
        self.begin()

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The leader's next order: {"order": name, ...details} and what came with it.

        Raises:
            Interrupted: some rank was asked to end.
            RankLostError: the leader is gone.
        """
        message = self._broadcast(None)
        size = _HEADER.unpack_from(message)[0]
        body = _HEADER.size
        order = json.loads(message[body : body + size])
        if order["order"] != "end":
            self.pause()
        return order, message[body + size :]

    def idle(self) -> None:
        """Called by the leader every now and then while it waits for somebody else, so that nobody's time-out expires.

        Raises:
            Interrupted: some rank was asked to end.
        """
        if self._listening:
            self._listening = False
            self._tell("wait", b"", {})
            self._listening = True

    def begin(self) -> None:
        """The others listen from now on."""
        self._listening = self.size > 1

    def end(self, reason: str, failed: bool) -> None:
        """Dismisses the others, if they still listen."""
        if self._listening:
            self._listening = False
            with contextlib.suppress(RankLostError):
                self._send("end", b"", {"reason": reason, "failed": failed})

    def _tell(self, order: str, data: bytes, details: dict[str, Any]) -> None:
        if self.size > 1:
            self._listening = False
            self._send(order, data, details)
            self.pause()

    def _send(self, order: str, data: bytes, details: dict[str, Any]) -> None:
        header = json.dumps({"order": order, **details}).encode()
        self._broadcast(_HEADER.pack(len(header)) + header + data)

    # Decisions -----------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """A point at which all ranks can end together.

        Raises:
            Interrupted: some rank was asked to end.
        """
        if self._any(self.interrupt.is_set()):
            self.interrupt.set()
            raise Interrupted

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """What one rank raises in here, all raise after it: each does its own share, and the batch is one.

        Raises:
            RefusedSamplesError: some rank refused samples; names all of them.
            Interrupted: some rank was asked to end.
            RankLostError: another rank failed.
        """
        own: BaseException | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            own = error
        refused: dict[str, str] = {}
        failed: list[int] = []
        interrupted = False
        try:
            outcomes = self._outcomes(own)
        except RankLostError:
            # The others were about to do something else together, or are gone: the error is why.
            if own is None or isinstance(own, RefusedSamplesError):
                raise
            raise own from None
        for rank, said in enumerate(outcomes):
            refused |= said.get("refused", {})
            interrupted |= said.get("interrupted", False)
            failed += [rank] if said.get("failed") else []
        if own is not None and not isinstance(own, RefusedSamplesError):
            raise own
        if failed:
            raise RankLostError(f"rank {failed[0]} failed; its last line says why")
        if interrupted:
            raise Interrupted
        if refused:
            raise RefusedSamplesError(refused)

    def _outcomes(self, own: BaseException | None) -> list[dict[str, Any]]:
        if self._parallel is None:
            return []
        said = np.frombuffer(_outcome(own), np.uint8)
        with _lost():
            return [json.loads(part.tobytes()) for part in self._parallel.gather(said, "outcome")]

    def _any(self, flag: bool) -> bool:
        if self._parallel is None:
            return flag
        with _lost():
            return any(part[0] for part in self._parallel.gather(np.array([flag], np.uint8)))

    def _broadcast(self, payload: bytes | None) -> bytes:
        with _lost():
            return self._parallel.broadcast(payload)

    # Figures -------------------------------------------------------------------------------------------------------

    def gather(self, values: np.ndarray) -> list[np.ndarray]:
        """1-d arrays of all data ranks, by rank; lengths may differ."""
        return [values] if self._parallel is None else self._parallel.gather_data(values)

    def total(self, value: float) -> float:
        """The sum over data ranks."""
        return value if self._parallel is None else float(self._parallel.sum_data(np.array([value], np.float64))[0])

    def from_last_stage(self, make: Callable[[], Any]) -> Any:
        """What `make` gives on the last pipeline stage, on every rank; JSON."""
        if self._parallel is None:
            return make()
        payload = json.dumps(make()).encode() if self.is_last_stage else None
        return json.loads(self._parallel.from_last_stage(payload))

    def column_of_last_stage(self, values: np.ndarray) -> np.ndarray:
        """float32 [n] as the last pipeline stage has it."""
        if self._parallel is None:
            return values
        payload = values.astype("<f4").tobytes() if self.is_last_stage else None
        return np.frombuffer(self._parallel.from_last_stage(payload), "<f4")


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """What an error says, for people. Exchanges inside the model fail with pages of text when a rank is gone."""
    lost = None if isinstance(error, RankLostError) else lost_rank(error)
    return lost or str(error) or type(error).__name__


def _outcome(error: BaseException | None) -> bytes:
    if error is None:
        said: dict[str, Any] = {}
    elif isinstance(error, RefusedSamplesError):
        said = {"refused": error.refused}
    elif isinstance(error, Interrupted):
        said = {"interrupted": True}
    else:
        said = {"failed": True}
    return json.dumps(said).encode()
