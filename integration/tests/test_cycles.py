"""A light run, started and stopped many times: servers are real, their processes are not."""

from __future__ import annotations

import asyncio

import pytest
from launch_support import stage_command
from stage import services

from vime_launch.plan import RunFolder, processes
from vime_launch.recipe import STAGES, check_recipe
from vime_launch.supervisor import Supervisor
from vime_proto.server import ServerInfo, start_server


class LightHosts:
    """Hosts whose processes are servers of this event loop."""

    def __init__(self):
        self.servers = {}
        self.ended: dict[str, asyncio.Future] = {}
        self.starting = 0
        self.all_up = asyncio.Event()

    async def prepare(self, group):
        for process in group:
            self.ended[process.name] = asyncio.get_running_loop().create_future()

    def listen_on(self, process):
        return None

    async def start(self, process, command, folder, grace):
        self.starting += 1
        if self.starting == len(STAGES):
            self.all_up.set()
        if process.serves:
            info = ServerInfo(package=f"test-{process.kind}", role=process.kind, run_id=process.config.get("run_id", ""))
            server = self.servers[process.name] = await start_server(services(process.kind, {"steps": 0}), info)
            await server.set_serving(True)
        return self.starting

    async def address(self, process, folder):
        return self.servers[process.name].address

    async def wait(self, process):
        return await asyncio.shield(self.ended[process.name])

    async def stop(self, name):
        if name in self.servers:
            await self.servers.pop(name).stop(0)
        self.die(name, 0)

    def die(self, name, code):
        if not self.ended[name].done():
            self.ended[name].set_result(code)

    @property
    def names(self):
        return list(self.ended)


@pytest.mark.timeout(300)
async def test_fifty_starts_and_stops_leave_nothing_behind(tmp_path):
    values = {"name": "r1", **{kind: {"command": stage_command(kind)} for kind in STAGES}}
    recipe = check_recipe(values)
    folder = RunFolder(tmp_path / "r1")
    folder.make()
    others = asyncio.all_tasks()
    for cycle in range(50):
        hosts = LightHosts()
        supervisor = Supervisor(recipe, folder, processes(recipe, folder), hosts, lambda text: None)
        supervisor.spawn(supervisor.up(), "start")
        way = cycle % 3
        if way == 0:
            # Stopped on its way up, at another place each time.
            for _ in range(cycle):
                await asyncio.sleep(0)
            supervisor.end(130, "interrupted")
        else:
            await hosts.all_up.wait()
            supervisor.end(130, "interrupted") if way == 1 else hosts.die("worker-0", 9)
        async with asyncio.timeout(60):
            outcome = await supervisor.ended
            await supervisor.down()
        assert outcome.code == (9 if way == 2 else 130)
        assert not hosts.servers and all(one.done() for one in hosts.ended.values())
    # Cancelled tasks, and those of servers that stop, need a moment of the loop.
    async with asyncio.timeout(60):
        while left := [task for task in asyncio.all_tasks() - others if "grpc" not in repr(task)]:
            await asyncio.wait(left)
