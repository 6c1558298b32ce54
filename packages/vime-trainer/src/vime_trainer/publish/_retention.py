"""Which versions' bytes may go. Pure bookkeeping, no I/O."""

from __future__ import annotations

from collections.abc import Iterable


class Retention:
    """The newest version stays for engines that come late, and so does one that is on its way out and not published yet: an
    attempt that failed is repeated. An older one stays until every engine that was sent it has acknowledged it or given it up,
    and every reader has finished, however long that takes."""

    def __init__(self) -> None:
        self._pending: dict[str, set[str]] = {}
        self._readers: dict[str, int] = {}
        self._newest: str | None = None

    @property
    def newest(self) -> str | None:
        """The update published last."""
        return self._newest

    def add(self, update_id: str) -> None:
        """A version whose bytes are in place; not yet the newest."""
        self._pending.setdefault(update_id, set())

    def sent(self, update_id: str, engines: Iterable[str]) -> None:
        """Engines that were told of it."""
        self._pending.setdefault(update_id, set()).update(engines)

    def done(self, update_id: str, engine: str) -> None:
        """An engine runs it, or has given it up."""
        self._pending.get(update_id, set()).discard(engine)

    def published(self, update_id: str) -> None:
        """It is the newest from now on."""
        self._newest = update_id

    def opened(self, update_id: str) -> None:
        """A reader starts."""
        self._readers[update_id] = self._readers.get(update_id, 0) + 1

    def closed(self, update_id: str) -> None:
        """A reader ends."""
        self._readers[update_id] -= 1

    def take_removable(self) -> list[str]:
        """Versions that nobody needs; they are forgotten here."""
        added = list(self._pending)
        older = added[: added.index(self._newest)] if self._newest in self._pending else []
        free = [one for one in older if not self._pending[one] and not self._readers.get(one)]
        for update_id in free:
            del self._pending[update_id]
        return free
