"""Totals of a run, in rows."""

from __future__ import annotations

import sqlalchemy as sa

from vime_buffer._store.database import Transaction
from vime_buffer._store.schema import counters

COMMITTED = "committed"
FILTERED = "filtered"
EXPIRED = "expired"
DROPPED = "dropped"
LAPSED = "lapsed"
READ = "read"
ROLLOUTS_FAILED = "rollouts_failed"

_INSERT = counters.insert()
_ADD = (
    counters.update()
    .where(
        counters.c.run_id == sa.bindparam("run"),
        counters.c.name == sa.bindparam("counter"),
        counters.c.label == sa.bindparam("of"),
    )
    .values(value=counters.c.value + sa.bindparam("amount"))
)


def add(tx: Transaction, run_id: str, name: str, amount: int = 1, label: str = "") -> None:
    """Adds to a total; labels longer than 255 characters are cut."""
    if amount == 0:
        return
    label = label[:255]
    found = tx.execute(_ADD, {"run": run_id, "counter": name, "of": label, "amount": amount}).rowcount
    if not found:
        tx.execute(_INSERT, {"run_id": run_id, "name": name, "label": label, "value": amount})


def read(tx: Transaction, run_id: str) -> dict[str, dict[str, int]]:
    """Totals by name and label."""
    totals: dict[str, dict[str, int]] = {}
    rows = tx.execute(sa.select(counters.c.name, counters.c.label, counters.c.value).where(counters.c.run_id == run_id))
    for name, label, value in rows:
        totals.setdefault(name, {})[label] = value
    return totals
