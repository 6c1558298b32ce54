"""The contract's own suites, against the command as a process: as a router, and as the engine that it must look like."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys

import pytest
from test_process import ENVIRONMENT, Process, command

pytest.importorskip("vime_proto.conformance.router")
# Where the distribution is installed its entry point loads the plugin, and naming it again would be an error.
INSTALLED = bool(importlib.metadata.entry_points(group="pytest11", name="vime_conformance"))
PLUGIN = [] if INSTALLED else ["-p", "vime_proto.conformance.plugin"]
FAKE = [sys.executable, "-m", "vime_proto.fakes", "engine", "--engine-id"]


async def run_suite(name: str, address: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGIN],
        *["--pyargs", f"vime_proto.conformance.{name}", "--target", address],
        env=ENVIRONMENT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output[-6000:]
    assert " passed" in output and " failed" not in output


@pytest.mark.parametrize("policy", ["round_robin", "least_outstanding_tokens"])
async def test_router_suite(policy):
    words = ["serve", "--policy", policy, "--health.interval-seconds", "0.2"]
    async with Process(command(*words)) as router:
        await run_suite("router", router.address)


async def test_rollout_suite_with_engines_behind_the_router():
    async with Process([*FAKE, "a"]) as first, Process([*FAKE, "b"]) as second:
        engines = f'[{{id="a", address="{first.address}"}}, {{id="b", address="{second.address}"}}]'
        async with Process(command("serve", "--engines", engines)) as router:
            await run_suite("rollout", router.address)
