"""What test_ranks.py has two ranks do: settings, inputs and the start of two processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from make import answer, group, index_of, prompt, rollout, sample, samples_of
from stages import settings_for
from test_megatron import groups_of
from test_services import import_settings
from tests_support import tiny_moe_folder

from vime_proto.sample.v1 import sample_pb2
from vime_proto.tensor import to_numpy, to_tensor
from vime_proto.version import policy_version
from vime_r3.trace import encode
from vime_trainer.packed import pack
from vime_trainer.policy import Policy
from vime_trainer.rl import write_batch

KL = {"kl": {"coefficient": 0.1, "refresh_interval": 2}}
LIVE = {
    "data": ({}, {"batch": {"optimizer_steps": 2}, "algorithm": KL}),
    "tensor": ({"tensor": 2}, {}),
    "pipeline": ({"pipeline": 2}, {"batch": {"optimizer_steps": 2}}),
}
PPO = {"ppo_dp2": {}, "ppo_pp2": {"pipeline": 2}}
LAYOUTS = {
    "dp2": {},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
    "ep2": {"expert": 2},
}


def odd_batches(folder):
    """One trainable sample for two ranks, then none at all, then a batch like any other."""

    def pair(name, one, other):
        return group(
            name,
            rollout(f"{name}0", 1.0, sample(f"{name}0", prompt(), answer(one))),
            rollout(f"{name}1", 0.0, sample(f"{name}1", prompt(), answer(other))),
        )

    for ordinal, groups in enumerate([[pair("a", [3, 4], [])], [pair("b", [], [])], [pair("c", [3], [5, 6, 7])]]):
        write_batch(folder, index_of(groups, ordinal=ordinal, batch_id=f"{ordinal:06d}"), samples_of(groups))
    return folder


def megatron_settings(tmp, output, **changes):
    """Two steps of two optimizer steps each on what a Megatron engine answered, with its routes. The steps and the pass
    that scores the batch put different samples together, so that a rank sees other tokens of them. An epsilon that large
    makes Adam's steps follow the gradient, so that what is nearly 0 does not turn with the last bit."""
    return import_settings(
        tmp / "answers",
        output,
        model=tmp / "model",
        batch={"groups": 2, "group_size": 3, "token_budget": 20, "optimizer_steps": 2},
        optimizer={"learning_rate": 1e-2, "epsilon": 1e-2},
        **{"r3": "replay", "algorithm": {"kl": {"coefficient": 0.1}}, **changes},
    )


def ppo_settings(tmp, output, **changes):
    """As `megatron_settings`, with a critic that learns alone from the first batch."""
    return megatron_settings(
        tmp,
        output,
        algorithm={"name": "ppo", "bootstrap_truncated": True},
        critic={
            "head_std": 0.1,
            "warmup_batches": 1,
            "optimizer_steps": 1,
            "epochs": 2,
            "optimizer": {"learning_rate": 1e-2, "epsilon": 1e-2},
        },
        **changes,
    )


def sft_settings(tmp, name):
    return {
        "model": str(tmp / "model"), "output": str(tmp / name), "data": {"files": [str(tmp / "rows.jsonl")]}, "steps": 2,
        "batch_size": 5, "micro_batch_tokens": 24, "metrics": {"tensorboard": False},
        "optimizer": {"learning_rate": 1e-2, "epsilon": 1e-2},
    }  # fmt: skip


def wilful(engine):
    """Groups of an engine that chose other experts than the model would, and lost some rows: log-probs are of the routes
    that it says, with the model's own where it says nothing. Two rows of each sample are marked as not exact."""
    groups, random = groups_of(engine), np.random.default_rng(9)
    layers, experts = engine.replay.layer_ids, engine.arch.experts
    for number, one in enumerate(samples_of(groups).values()):
        start, made = (to_numpy(segment.token_ids) for segment in one.segments)
        count = len(start) + len(made)
        ids = np.argsort(random.random((count, len(layers), experts)))[..., : engine.arch.top_k].astype(np.uint8)
        valid = np.arange(count) % (4 + number) != 2
        valid[-1] = False
        with torch.no_grad(), engine.replay.use(ids, valid):
            logprobs = engine(pack([[*start, *made]])).logprobs[len(start) :].numpy()
        one.segments[1].generation.logprobs.CopyFrom(to_tensor(logprobs))
        trace = encode(
            ids[:-1], layer_ids=layers, experts=experts, version=policy_version("run", 0, 0), valid=valid[:-1],
            inexact=[(3, 5)], chunk_rows=3,
        )  # fmt: skip
        one.routing.CopyFrom(trace)
    return groups


def write_inputs(tmp):
    """A model, what it answered as an engine, and rows to learn."""
    tiny_moe_folder(tmp / "model")
    engine = Policy.from_hf(tmp / "model")
    engine.attach_replay()
    groups = wilful(engine)
    groups[0].rollouts[1].status = sample_pb2.ROLLOUT_STATUS_TRUNCATED
    for ordinal in range(2):
        name = f"{ordinal:06d}"
        write_batch(tmp / "answers", index_of(groups, ordinal=ordinal, batch_id=name), samples_of(groups))
    rows = [{"prompt": "<bos>" + "abcd"[: 1 + i % 4] + "=", "response": "dcba"[i % 3 :]} for i in range(11)]
    (tmp / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def jobs_of(stages, tmp, odd):
    """The jobs, as JSON."""

    def live(name, layout, **changes):
        settings = settings_for(stages[name], tmp / name, export_batches=tmp / name / "batches", **changes)
        return {"name": name, "layout": layout, "settings": settings.model_dump(mode="json", exclude={"parallel"})}

    jobs = []
    for name, (layout, changes) in LIVE.items():
        # In two parts: the second resumes.
        jobs += [live(name, layout, max_steps=count, **changes) for count in (2, 3)]
    jobs.append(live("served", {}, max_steps=1000, address_file=tmp / "served" / "address", checkpoint={"interval": 0}))
    waiting = live("waiting", {})
    odd_settings = import_settings(odd, tmp / "odd").model_dump(mode="json", exclude={"parallel"})
    checks = (
        "what_one_rank_refuses_all_refuse",
        "a_failure_of_one_rank_is_named_on_the_others",
        "an_interrupt_of_one_rank_ends_all",
    )
    jobs.append({"name": "odd", "layout": {}, "settings": odd_settings})
    for name, layout in PPO.items():
        for count in (1, 2):
            settings = ppo_settings(tmp, tmp / name, max_steps=count).model_dump(mode="json", exclude={"parallel"})
            jobs.append({"name": name, "layout": layout, "settings": settings, "megatron": True})
    for name, layout in LAYOUTS.items():
        settings = megatron_settings(tmp, tmp / name).model_dump(mode="json", exclude={"parallel"})
        jobs.append({"name": name, "layout": layout, "settings": settings, "megatron": True})
        jobs.append({"name": f"sft_{name}", "layout": layout, "sft": sft_settings(tmp, f"sft_{name}")})
    recorded = megatron_settings(tmp, tmp / "cp2_recorded", r3="record").model_dump(mode="json", exclude={"parallel"})
    jobs.append({"name": "cp2_recorded", "layout": LAYOUTS["cp2"], "settings": recorded, "megatron": True})
    jobs += [{"name": name, "layout": {}, "check": name} for name in checks]
    jobs.append({**waiting, "interrupted_rank": 1})
    return jobs


def start_two(tmp, jobs):
    """Two ranks that do these jobs: their exit statuses."""
    (tmp / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("rank_worker.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, tmp / "jobs.json", tmp / "results"],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=150)
            if process.returncode:
                print(said[-6000:])
        return [process.returncode for process in processes]
    finally:
        for process in processes:
            process.kill()
