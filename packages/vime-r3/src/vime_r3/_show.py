"""Traces for people, as tables. Needs rich: ``pip install 'vime-r3[inspect]'``."""

from __future__ import annotations

try:
    from rich.console import Console
    from rich.table import Table
except ImportError:
    raise ImportError("vime-r3 inspect needs rich: pip install 'vime-r3[inspect]'") from None

from vime_proto.routing.v1 import routing_pb2 as pb
from vime_proto.version import show
from vime_r3.agreement import Agreement
from vime_r3.load import expert_load
from vime_r3.trace import Routes, hole_count

__all__ = ["agreement", "trace"]


def trace(name: str, message: pb.RoutingTrace, routes: Routes) -> None:
    """Prints what a trace holds and how busy its experts are."""
    header, console = message.header, Console()
    rows = len(routes.ids)
    facts = Table(title=name, show_header=False, title_justify="left")
    layers = f"{len(routes.layer_ids)} ({routes.layer_ids[0]} to {routes.layer_ids[-1]})"
    stored = f"{header.payload_length} ({header.payload_length / max(rows, 1):.1f} a row, {len(header.chunks)} chunks)"
    for label, value in (
        ("rows", f"{rows} (a sample of {rows + 1} tokens)"),
        ("MoE layers", layers),
        ("experts", f"{routes.experts}, top {routes.ids.shape[2]}"),
        ("bytes", stored),
        ("holes", f"{hole_count(header)} rows: {_ranges(header.holes)}"),
        ("inexact", f"{int((routes.valid & ~routes.exact).sum())} rows: {_ranges(header.inexact)}"),
        ("versions", _spans(header)),
    ):
        facts.add_row(label, value)
    console.print(facts)
    load = expert_load(routes)
    table = Table(title="load of the experts", title_justify="left")
    for column in ("layer", "busiest", "its tokens", "of the mean", "never chosen"):
        table.add_column(column, justify="right")
    for place, layer in enumerate(load.layer_ids):
        busiest = int(load.counts[place].argmax())
        table.add_row(
            str(layer),
            str(busiest),
            str(load.counts[place, busiest]),
            f"{load.imbalance[place]:.2f}",
            str(load.unused[place]),
        )
    console.print(table)


def agreement(found: Agreement) -> None:
    """Prints in which share of rows two traces chose the same experts, layer by layer."""
    console = Console()
    table = Table(title=f"agreement over {found.tokens} rows that both have", title_justify="left")
    for column in ("layer", "rows that differ", "agreement"):
        table.add_column(column, justify="right")
    for layer, flips, share in zip(found.layer_ids, found.flips.tolist(), found.layer_agreement.tolist(), strict=True):
        table.add_row(str(layer), str(flips), f"{share:.4f}")
    console.print(table)
    console.print(
        f"{found.flip_share:.4f} of row-layers differ, {found.token_share:.4f} of rows in at least one layer, "
        f"{found.experts_changed} experts changed"
    )


def _ranges(messages) -> str:
    shown = [f"[{one.start}, {one.stop})" for one in messages[:5]]
    more = f" and {len(messages) - 5} more" if len(messages) > 5 else ""
    return (" ".join(shown) or "none") + more


def _spans(header: pb.RoutingTraceHeader) -> str:
    """Row ranges of each version, with neighbours joined across holes."""
    found: list[tuple[int, int, str]] = []
    for span in header.spans:
        version = show(span.version)
        if found and found[-1][2] == version:
            found[-1] = (found[-1][0], span.rows.stop, version)
        else:
            found.append((span.rows.start, span.rows.stop, version))
    return ", ".join(f"{version} rows [{start}, {stop})" for start, stop, version in found) or "none"
