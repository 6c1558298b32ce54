"""What a run looks like in the terminal: a table that updates, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vime_launch.metrics import (
    ACCURACY,
    EVALUATION,
    LOGPROB_DIFF,
    REWARD,
    SECONDS,
    STALENESS,
    STEP_SECONDS,
    TOKENS_PER_SECOND,
    Row,
)

_ROWS = 12
_COLUMNS = (
    ("reward", REWARD, "{:.3f}"),
    ("log-prob diff", LOGPROB_DIFF, "{:.1e}"),
    ("staleness", STALENESS, "{:.2f}"),
    ("tokens/s", TOKENS_PER_SECOND, "{:.0f}"),
)


def time_shares(row: Mapping[str, float]) -> list[tuple[str, float]]:
    """Where a step's time went: (part, share of the step), largest first; empty when it was not measured.

    What no part accounts for is "other".
    """
    parts = {name.removeprefix(SECONDS): value for name, value in row.items() if name.startswith(SECONDS)}
    whole = parts.pop(STEP_SECONDS.removeprefix(SECONDS), sum(parts.values()))
    if not whole:
        return []
    rest = whole - sum(parts.values())
    if rest > 0.005 * whole:
        parts["other"] = rest
    return sorted(((name, value / whole) for name, value in parts.items()), key=lambda one: -one[1])


def line(step: int, row: Mapping[str, float]) -> str:
    """One step as one line."""
    words = [f"step {step}"]
    words += [f"{label} {form.format(row[name])}" for label, name, form in _COLUMNS if name in row]
    words += [f"{name} {row[name]:.3f}" for name in sorted(row) if name.startswith(EVALUATION) and name.endswith(ACCURACY)]
    shares = time_shares(row)[:4]
    if shares:
        words.append("time " + " ".join(f"{name} {share:.0%}" for name, share in shares))
    return "  ".join(words)


class View:
    """The live view; a context manager.

    Args:
        console: where to show it.
        title: the run's name and mode.
    """

    def __init__(self, console: Console, title: str):
        self._console, self._title = console, title
        self._rows: dict[int, Row] = {}
        self._stats = ""
        self._started = time.monotonic()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> View:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line above the table."""
        self._console.print(f"[{time.monotonic() - self._started:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, row: Row) -> None:
        """Shows the values of a step."""
        self._rows[step] = row
        if self._live is None:
            self.say(line(step, row))

    def stats(self, text: str) -> None:
        """The buffer's counters; only the table shows them."""
        self._stats = text

    def _render(self) -> Group:
        table = Table(title=f"{self._title}, {time.monotonic() - self._started:.0f} s", title_justify="left", expand=False)
        table.add_column("step", justify="right")
        for label, _, _ in _COLUMNS:
            table.add_column(label, justify="right")
        table.add_column("held out", justify="right")
        table.add_column("where the time goes")
        for step in sorted(self._rows)[-_ROWS:]:
            row = self._rows[step]
            held = [row[name] for name in sorted(row) if name.startswith(EVALUATION) and name.endswith(ACCURACY)]
            table.add_row(
                str(step),
                *(form.format(row[name]) if name in row else "" for _, name, form in _COLUMNS),
                f"{held[0]:.3f}" if held else "",
                _bar(time_shares(row)),
            )
        return Group(table, Text(self._stats, style="dim"))


def _bar(shares: list[tuple[str, float]]) -> Text:
    text = Text()
    colours = ("cyan", "magenta", "yellow", "green", "blue", "red")
    for place, (name, share) in enumerate(shares[: len(colours)]):
        if share >= 0.02:
            text.append("█" * max(1, round(share * 16)), style=colours[place])
            text.append(f" {name} {share:.0%} ")
    return text
