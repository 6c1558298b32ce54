"""``vime-r3``: looks into traces."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vime_proto.errors import ContractError
from vime_proto.routing.v1 import routing_pb2 as pb
from vime_r3 import __version__
from vime_r3.agreement import Agreement, compare
from vime_r3.trace import Routes, decode

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; answers the exit status."""
    parser = argparse.ArgumentParser(prog="vime-r3", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser(
        "inspect",
        allow_abbrev=False,
        help="print and plot what a trace holds, and how far two traces of the same tokens agree",
    )
    inspect.add_argument("trace", type=Path, help="file with a serialized vime.routing.v1.RoutingTrace")
    inspect.add_argument("other", type=Path, nargs="?", help="another trace of the same tokens, to compare with")
    inspect.add_argument("--plot", type=Path, help="PNG file to write (needs matplotlib)")
    inspect.add_argument("--root", help="directory or fsspec URI below which traces by URI lie")
    options = parser.parse_args(argv)
    try:
        return _inspect(options)
    except (ContractError, OSError, ImportError) as error:
        print(f"vime-r3: {error}", file=sys.stderr)
        return 1


def _inspect(options: argparse.Namespace) -> int:
    from vime_r3 import _show

    files = [options.trace] if options.other is None else [options.trace, options.other]
    read = [_read(file, options.root) for file in files]
    agreement = None if len(read) == 1 else _agreement(*(routes for _, routes in read))
    for file, (trace, routes) in zip(files, read, strict=True):
        _show.trace(str(file), trace, routes)
    if agreement is not None:
        _show.agreement(agreement)
    if options.plot is not None:
        from vime_r3 import _plot

        _plot.write(options.plot, {str(file): routes for file, (_, routes) in zip(files, read, strict=True)}, agreement)
        print(f"wrote {options.plot}")
    return 0


def _read(file: Path, root: str | None) -> tuple[pb.RoutingTrace, Routes]:
    from google.protobuf.message import DecodeError

    try:
        trace = pb.RoutingTrace.FromString(file.read_bytes())
    except DecodeError:
        raise ContractError(str(file), "holds no serialized RoutingTrace") from None
    try:
        payload = None
        if trace.WhichOneof("payload") == "uri" and root is not None:
            from vime_r3.storage import TraceFiles

            payload = TraceFiles(root).reader(trace)
        return trace, decode(trace, payload=payload)
    except ContractError as error:
        raise error.under(str(file)) from None


def _agreement(one: Routes, other: Routes) -> Agreement:
    for name in ("layer_ids", "experts"):
        if getattr(one, name) != getattr(other, name):
            raise ContractError("other", f"has {name} {getattr(other, name)}, the first trace {getattr(one, name)}")
    # Rows that both have: two requests for the same prompt may have gone on differently.
    rows = min(len(one.ids), len(other.ids))
    both = one.valid[:rows] & other.valid[:rows]
    return compare(one.ids[:rows], other.ids[:rows], layer_ids=one.layer_ids, valid=both)


if __name__ == "__main__":
    sys.exit(main())
