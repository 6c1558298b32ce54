"""What happens by the clock alone: leases lapse, evaluations end, old answers are forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import sqlalchemy as sa

from vime_buffer._service.core import Core
from vime_buffer._store import evaluations, leases, payloads, requests
from vime_buffer._store.database import Transaction
from vime_buffer._store.schema import runs as run_rows

log = logging.getLogger(__name__)

_FORGET_EVERY_SECONDS = 300.0
_SHORTEST_SLEEP = 0.02


def recover(core: Core) -> None:
    """Brings files and leases of an earlier process in line with the rows."""
    swept = core.files.sweep(core.database.read(payloads.known_paths))
    if swept:
        log.info("deleted %d payload files that no row names", swept)
    core.database.run_sync(lambda tx: leases.extend_all(tx, core.ttl))


async def keep_house(core: Core) -> None:
    """Runs until the core stops. Sleeps until the next thing is due: a lease that is granted later lapses later."""
    forget_at = core.clock()
    while not core.stopping:
        core.due.clear()
        if core.clock() >= forget_at:
            forget_at = core.clock() + _FORGET_EVERY_SECONDS
            await core.database.run(lambda tx: _forget(tx, core))
        due = await core.database.run(_settle)
        sleep = core.ttl if due is None else min(core.ttl, due - core.clock())
        # Not wait_for: on Python 3.11 it loses a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(_SHORTEST_SLEEP, min(sleep, _FORGET_EVERY_SECONDS))):
                await core.due.wait()


def _settle(tx: Transaction) -> float | None:
    for run_id in tx.execute(sa.select(run_rows.c.run_id)).scalars().all():
        leases.lapse(tx, run_id)
    evaluations.close_overdue(tx)
    dues = [due for due in (leases.next_expiry(tx), evaluations.next_deadline(tx)) if due is not None]
    return min(dues, default=None)


def _forget(tx: Transaction, core: Core) -> None:
    requests.forget(tx, tx.now - core.settings.request_keep_seconds)
    leases.forget(tx, tx.now - core.settings.request_keep_seconds)
    payloads.delete_abandoned(tx, tx.now - core.settings.blob_keep_seconds)
