"""A scoring process: reads requests from a pipe, answers each. Frames are a 4-byte length and JSON; nothing is pickled."""

from __future__ import annotations

import json
import os
import struct
import sys
import traceback
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<I")


def write_frame(pipe: BinaryIO, message: Any) -> None:
    """Writes one message."""
    data = json.dumps(message).encode()
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> Any | None:
    """Reads one message; None at the end of the pipe."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    return json.loads(data) if len(data) == length else None


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    # A reward that prints must not write into the answers: its stdout becomes stderr, its stdin empty.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, answers


def _limit_memory(mebibytes: int) -> None:
    if mebibytes <= 0 or sys.platform != "linux":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = mebibytes << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def main() -> int:
    """Serves until the pipe ends."""
    from vime_proto.errors import ContractError
    from vime_proto.process import exit_with_parent
    from vime_rollout.rewards._math import _library
    from vime_rollout.rewards._registry import RewardSpec, apply, resolve
    from vime_rollout.rewards._types import RewardError, RewardInput

    exit_with_parent()
    requests, answers = _take_pipes()
    setup = read_frame(requests)
    if setup is None:
        return 0
    sys.path[:0] = [entry for entry in setup["path"] if entry not in sys.path]
    _limit_memory(setup["memory_mib"])
    functions: dict[str, tuple[Any, RewardSpec]] = {}

    def find(table: dict[str, Any]) -> tuple[Any, RewardSpec]:
        if table["name"] not in functions:
            spec = RewardSpec(**table)
            functions[spec.name] = resolve(spec), spec
            if spec.function == "math":
                # Its import takes a second, which must not count as the run time of the first response.
                _library()
        return functions[table["name"]]

    try:
        for table in setup["preload"]:
            find(table)
    except ContractError as error:
        write_frame(answers, {"error": str(error)})
        return 1
    write_frame(answers, {"ready": True})
    while (request := read_frame(requests)) is not None:
        item = request["item"]
        item["turns"] = tuple(item["turns"])
        try:
            function, spec = find(request["spec"])
            score = apply(function, spec, RewardInput(**item))
            answer = {"value": score.value, "parts": dict(score.parts)}
        except (ContractError, RewardError) as error:
            answer = {"error": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        write_frame(answers, answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
