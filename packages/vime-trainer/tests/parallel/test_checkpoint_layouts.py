"""Checkpoints go from any layout of ranks to any other: the same bits, and the same loss at the next step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import checkpoint_workload
import launch
import pytest
import torch
import workload
from checkpoint_workload import Chain
from tests_support import make_folder

from vime_trainer import cli
from vime_trainer.checkpoint import load_checkpoint, path_of
from vime_trainer.checkpoint._boxes import Box
from vime_trainer.checkpoint._stored import StoredCheckpoint
from vime_trainer.policy import Policy

SHARDED = {"distributed": True}

CHAINS = [
    Chain("dense", "dense", [SHARDED, {"tensor": 2}, {"pipeline": 2}, SHARDED | {"context": 2}], resumed=True),
    Chain("tied", "tied", [{"pipeline": 2, "virtual": 2}, {"tensor": 2}, SHARDED, {"pipeline": 2}]),
    Chain("moe", "moe", [{"tensor": 2, "expert": 2}, {"pipeline": 2}, SHARDED, {"expert_tensor": 2}], critic=True),
    Chain("glm", "glm", [SHARDED | {"expert": 2}, {"tensor": 2, "expert": 2}, {"expert": 2}]),
    Chain("bfloat16", "dense", [SHARDED, {"tensor": 2}, {"context": 2}], dtype="bfloat16", resumed=True),
    Chain("tensor", "moe", [{"tensor": 2}, SHARDED | {"expert": 2}], resumed=True),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Folders of models and of checkpoints, and losses by chain: one start for all chains."""
    root, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("checkpoints")
    workload.make_models(root)
    make_folder("glm4_moe", root / "glm")
    arguments = [str(root), str(out), json.dumps([chain.to_json() for chain in CHAINS])]
    launch.start(2, Path(__file__).parent / "checkpoint_rank.py", arguments, seconds=150)
    ranks = [json.loads((out / f"losses-{rank}.json").read_text()) for rank in range(2)]
    losses = {
        chain.name: [
            first if first is not None else second
            for first, second in zip(ranks[0][chain.name], ranks[1][chain.name], strict=True)
        ]
        for chain in CHAINS
    }
    return root, out, losses


def tensors_of(path):
    """All tensors of a checkpoint but random states; the vocabulary cut to what it is without padding."""
    stored, found = StoredCheckpoint(path), {}
    for name, entry in stored.manifest.items():
        if name.startswith("random/"):
            continue
        padded = "embedding" in name or name.startswith("policy/") and "output_layer" in name
        shape = (workload.VOCAB, *entry.shape[1:]) if padded and entry.shape else entry.shape
        found[name] = torch.empty(shape, dtype=getattr(torch, entry.dtype))
        stored.fill(name, Box.whole(shape), found[name])
    return found


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)
def test_layouts_hand_on_the_same_bits_and_the_same_loss(chain, found, tmp_path):
    root, out, losses = found
    want = tensors_of(path_of(out / chain.name, 0))
    kinds = {name.split("/")[2] for name in want if "/optimizer/" in name}
    assert {name.split("/")[0] for name in want} == {"policy"} | ({"critic"} if chain.critic else set())
    assert any("expert_bias" in name for name in want) == (chain.model == "glm")
    assert kinds == {"exp_avg", "exp_avg_sq", "step"} | ({"master"} if chain.dtype == "bfloat16" else set())
    last = path_of(out / chain.name, len(chain.layouts) - 1)
    single = dataclasses.replace(chain, layouts=[{}], start=str(last))
    alone = checkpoint_workload.run(single, root, tmp_path)
    paths = [path_of(out / chain.name, number) for number in range(1, len(chain.layouts))]
    for path in [*paths, path_of(tmp_path, 0)]:
        got = tensors_of(path)
        assert got.keys() == want.keys(), path
        for name, value in got.items():
            assert torch.equal(value, want[name]), (path, name)
    tolerance = 1e-6 if chain.dtype == "float32" else 2e-2
    assert losses[chain.name] == pytest.approx(alone * len(chain.layouts), abs=tolerance, rel=tolerance)


def test_a_checkpoint_of_two_ranks_is_exported_by_one(found, tmp_path, capsys):
    root, out, _ = found
    (chain,) = (chain for chain in CHAINS if chain.name == "glm")
    words = ["export", "--model", root / "glm", "--checkpoint", out / chain.name, "--output", tmp_path / "hf"]
    assert cli.main([str(word) for word in words]) == 0, capsys.readouterr().err
    want = Policy.from_hf(root / "glm")
    untrained = {name: value.clone() for name, value in want.weights().items()}
    load_checkpoint(path_of(out / chain.name, 0), want)
    for name, value in Policy.from_hf(tmp_path / "hf").weights().items():
        assert torch.equal(value, want.weights()[name]), name
        assert torch.equal(value, untrained[name]) == name.endswith("expert_bias"), name
