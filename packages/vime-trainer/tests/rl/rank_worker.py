"""One rank of the tests in test_ranks.py: runs jobs one after the other and writes what came of each.

    RANK=0 WORLD_SIZE=2 ... python rank_worker.py JOBS.json RESULTS

A job is {"name", "layout", and one of "settings" of a run of the toy model (of a real one if "megatron"), "sft": settings of
fine-tuning, "check": name of a function here}. What a real model's runs received of the routes is the result
"<name>/received".
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from served_folder import served_folder
from toy_ranks import RankedToy

from vime_trainer.batch import RefusedSamplesError
from vime_trainer.megatron import ParallelConfig, initialize
from vime_trainer.ranks import rank
from vime_trainer.rl import Interrupted, RlSettings, _run, train
from vime_trainer.rl._megatron import MegatronBackend
from vime_trainer.rl._team import RankLostError, Team
from vime_trainer.sft import SftSettings, run_sft


def what_one_rank_refuses_all_refuse(team: Team) -> list[str]:
    said = []
    for own in ({"a": "broken"} if team.rank == 0 else {}, {"b": "torn"} if team.rank == 1 else {}, {team.rank: "x"}):
        try:
            with team.settled():
                if own:
                    raise RefusedSamplesError({str(name): reason for name, reason in own.items()})
        except RefusedSamplesError as error:
            said.append(sorted(error.refused))
    with team.settled():
        said.append("nothing")
    return said


def a_failure_of_one_rank_is_named_on_the_others(team: Team) -> str:
    try:
        with team.settled():
            if team.rank == 1:
                raise OSError("disk full")
    except (OSError, RankLostError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def an_interrupt_of_one_rank_ends_all(team: Team) -> str:
    if team.rank == 1:
        team.interrupt.set()
    try:
        team.pause()
    except Interrupted:
        return f"interrupted, {team.interrupt.is_set()}"
    return "nothing"


def a_rank_that_dies_is_noticed(team: Team) -> str:
    if team.rank == 1:
        os._exit(9)
    try:
        team.pause()
    except RankLostError as error:
        return str(error)
    return "nothing"


def train_served(settings: RlSettings, received: list) -> str:
    """As `train`, of exported batches that a buffer holds."""
    with served_folder(settings) as (source, counted):
        _run.FolderSource = source
        reason = train(settings, MegatronBackend)
    received += counted
    return reason


def run(job: dict, received: list) -> object:
    """What came of a job, for JSON."""
    if "check" in job:
        return globals()[job["check"]](Team(initialize(ParallelConfig(**job["layout"]))))
    if "sft" in job:
        return str(run_sft(SftSettings(**job["sft"], parallel=job["layout"])))
    settings = RlSettings(**job["settings"], parallel=job["layout"])
    if job.get("megatron"):
        return train_served(settings, received)
    interrupt = threading.Event()
    if rank() == job.get("interrupted_rank"):
        threading.Timer(1.0, interrupt.set).start()
    try:
        return train(settings, RankedToy, interrupt)
    except Interrupted:
        return "interrupted"


def main() -> None:
    jobs, results = json.loads(Path(sys.argv[1]).read_text()), {}
    for job in jobs:
        received = results.setdefault(f"{job['name']}/received", [])
        results.setdefault(job["name"], []).append(run(job, received))
    Path(sys.argv[2], f"{rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
