"""Ray: a small cluster here or one that runs already, and one actor per process on the right host with the right GPUs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from vime_launch.host import Host
from vime_launch.placement import Bundle, order_bundles, sort_gpu_ids
from vime_launch.plan import Process, RunFolder
from vime_launch.recipe import RayTable

# Entries that Ray writes into its workers' environment, which a stage must not inherit unless the user set them.
_RAYS_OWN = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_RAY_ATTEMPTS = 3
# Calls of one actor that may run at once: wait, address and stop, with some to spare.
_CONCURRENCY = 6


class Hosts:
    """The actors of a run. Made on the main thread: a cluster started here ends with the thread that started it."""

    def __init__(self, table: RayTable):
        # Ray reads these when it is imported.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Its workers run at low priority by default, and what they start inherits that.
        os.environ.setdefault("RAY_worker_niceness", "0")
        import ray

        self._ray = ray
        self._unset = [name for name in _RAYS_OWN if name not in os.environ]
        self._local = table.address is None
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._local:
            options |= {
                "address": "local",
                "num_cpus": table.cpus,
                "num_gpus": table.gpus,
                "object_store_memory": table.object_store_mib << 20,
                "include_dashboard": False,
            }
        else:
            options["address"] = table.address
        self._start(options)
        self._actors: dict[str, Any] = {}
        self._places: dict[str, tuple[str, list[str]]] = {}

    def _start(self, options: dict[str, Any]) -> None:
        # Ray gives a node of its own thirty seconds and no way to ask for more: too few on a host that is very busy.
        for left in reversed(range(_RAY_ATTEMPTS)):
            try:
                self._ray.init(**options)
                return
            except Exception as error:
                self._ray.shutdown()
                if not (left and "timed out during startup" in str(error)):
                    raise

    async def prepare(self, processes: Sequence[Process]) -> None:
        """Makes the actors of one stage, placed host by host where it asks for GPUs."""
        stage = processes[0].stage
        ray = self._ray
        gpus = stage.gpus * stage.ranks
        options: dict[str, Any] = {
            "num_cpus": stage.cpus,
            "num_gpus": gpus,
            "max_concurrency": _CONCURRENCY,
        }
        make = ray.remote(Host).options
        if gpus:
            from ray.util.placement_group import placement_group
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            bundle = {"GPU": float(gpus)} | ({"CPU": stage.cpus} if stage.cpus else {})
            group = placement_group([bundle] * len(processes), strategy="PACK")
            try:
                async with asyncio.timeout(stage.start_seconds):
                    await group.ready()
            except TimeoutError:
                raise RuntimeError(
                    f"{processes[0].kind}: the cluster has no room for {len(processes)} x {bundle} "
                    f"({ray.cluster_resources().get('GPU', 0):g} GPUs in all)"
                ) from None
            strategy = PlacementGroupSchedulingStrategy
            actors = [
                make(**options, scheduling_strategy=strategy(group, placement_group_bundle_index=index)).remote()
                for index in range(len(processes))
            ]
        else:
            actors = [make(**options).remote() for _ in processes]
        places = [await actor.place.remote() for actor in actors]
        order = order_bundles([Bundle(index, host, tuple(gpus)) for index, (host, gpus) in enumerate(places)])
        for process, bundle in zip(processes, order, strict=True):
            self._actors[process.name] = actors[bundle.index]
            self._places[process.name] = (bundle.host, sort_gpu_ids(bundle.gpus))

    def listen_on(self, process: Process) -> str | None:
        """The host to listen on; None where everything is on this host."""
        return None if self._local else self._places[process.name][0]

    async def start(self, process: Process, command: Sequence[str], folder: RunFolder, grace: float) -> int:
        """Starts the process; answers the process id of its guard."""
        gpus = self._places[process.name][1]
        return await self._actors[process.name].start.remote(
            list(command),
            process.stage.env,
            self._unset,
            gpus,
            str(folder.log(process.name)),
            str(folder.address(process.name)),
            grace,
        )

    async def address(self, process: Process, folder: RunFolder) -> str | None:
        """Where it listens; None when it ended before it did."""
        return await self._actors[process.name].address.remote(str(folder.address(process.name)))

    async def wait(self, process: Process) -> int | None:
        """Its exit status (128 + n for signal n); None when the actor itself was lost, and the process with it."""
        try:
            code = await self._actors[process.name].wait.remote()
            return 128 - code if code < 0 else code
        except self._ray.exceptions.RayError:
            return None

    async def stop(self, name: str) -> None:
        """Ends the process of this name, if it runs."""
        try:
            await self._actors[name].stop.remote()
        except self._ray.exceptions.RayError:
            return

    @property
    def names(self) -> list[str]:
        return list(self._actors)

    def shutdown(self) -> None:
        """Ends the actors, and the cluster when it was started here. A guard ends its process when its actor ends."""
        self._ray.shutdown()
