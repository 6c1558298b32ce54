"""The Ray actor that holds one process. Nothing of vime or gRPC is imported here: the actor starts on any host in a second."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from vime_launch import guard
from vime_launch.placement import merge_environment

_ADDRESS_POLL_SECONDS = 0.05


class Host:
    """Starts one command at a time through a guard, and answers how it fares. Its calls run in threads of the actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._stopping = False

    def place(self) -> tuple[str, list[str]]:
        """The host's address and the ids of the GPUs that Ray granted to this actor."""
        import ray.util

        ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ray.util.get_node_ip_address(), [str(one) for one in ids]

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        unset: Sequence[str],
        gpus: Sequence[str],
        log: str,
        address_file: str,
        grace: float,
    ) -> int:
        """Starts the command with output to ``log``, and answers the guard's process id.

        Args:
            env: entries of the environment beside this host's own.
            unset: entries that Ray added to this host's own.
            gpus: ids of the devices that the command may see.
            address_file: what the command writes once it listens; an old one is removed.
            grace: seconds that the command has to end by itself.
        """
        if self._stopping:
            raise RuntimeError("the run is stopping")
        Path(address_file).unlink(missing_ok=True)
        base = {key: value for key, value in os.environ.items() if key not in unset}
        self._ended = threading.Event()
        with open(log, "ab") as output:
            # The pipe on standard input is the guard's life line: it closes when this actor ends, in whatever way.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(grace), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=merge_environment(base, env, gpus),
                start_new_session=True,
            )
        threading.Thread(target=self._reap, args=(self._process, self._ended), daemon=True).start()
        return self._process.pid

    @staticmethod
    def _reap(process: subprocess.Popen[bytes], ended: threading.Event) -> None:
        process.wait()
        ended.set()

    def address(self, address_file: str) -> str | None:
        """Waits for the file that the command writes; None when the command ended without one."""
        path = Path(address_file)
        while not path.exists():
            if self._ended.wait(_ADDRESS_POLL_SECONDS) and not path.exists():
                return None
        return path.read_text().strip()

    def wait(self) -> int:
        """Waits for the command to end and answers its exit status (128 + n for signal n)."""
        assert self._process is not None, "nothing was started"
        process, ended = self._process, self._ended
        ended.wait()
        return process.returncode

    def stop(self) -> int | None:
        """Ends the command: SIGTERM, then SIGKILL after the grace that ``start`` was given. None when nothing ran."""
        self._stopping = True
        process = self._process
        if process is None:
            return None
        assert process.stdin is not None
        process.stdin.close()
        self._ended.wait()
        return process.returncode
