"""Every layout of ranks computes what one process computes: log-probs, loss, gradient norm, weights after two steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import launch
import pytest
import torch
import workload
from safetensors.torch import load_file
from workload import Case

TWO = [
    Case("dp2", "dense", {}),
    Case("dp2-moe", "moe", {}),
    Case("dp2-distributed", "dense", {}, optimizer={"distributed": True}),
    Case("dp2-distributed-moe", "moe", {}, optimizer={"distributed": True}),
    Case("dp2-masked-rank", "dense", {}, "masked"),
    Case("dp2-poisoned-rank", "dense", {}, "poison"),
    Case("dp2-bfloat16-distributed", "moe", {}, policy={"dtype": "bfloat16"}, optimizer={"distributed": True}),
    Case("tp2", "dense", {"tensor": 2}),
    Case("tp2-tied", "tied", {"tensor": 2}),
    Case("tp2-without-sequence", "tied", {"tensor": 2, "sequence": False}),
    Case("tp2-moe-routed", "moe", {"tensor": 2}, "routed"),
    Case("tp2-moe-recorded", "moe", {"tensor": 2}, "recorded", policy={"recompute": True}),
    Case("tp2-expert-tp2", "moe", {"tensor": 2, "expert_tensor": 2}),
    Case("tp2-ep2", "moe", {"tensor": 2, "expert": 2}),
    Case("tp2-ep2-glm", "glm", {"tensor": 2, "expert": 2}),
    Case("tp2-expert-tp2-glm-routed", "glm", {"tensor": 2, "expert_tensor": 2}, "routed"),
    Case("pp2-vpp2-glm-routed", "glm", {"pipeline": 2, "virtual": 2}, "routed"),
    Case("dp2-glm-distributed", "glm", {}, optimizer={"distributed": True}),
    Case("tp2-short", "dense", {"tensor": 2}, "short"),
    Case("pp2", "dense", {"pipeline": 2}),
    Case("pp2-tied", "tied", {"pipeline": 2}),
    Case("pp2-moe-routed", "moe", {"pipeline": 2}, "routed"),
    Case("pp2-vpp2-moe-recorded", "moe", {"pipeline": 2, "virtual": 2}, "recorded"),
    Case("pp2-masked", "dense", {"pipeline": 2}, "masked"),
    Case("pp2-poisoned", "dense", {"pipeline": 2}, "poison"),
    Case("pp2-odd-layers", "odd", {"pipeline": 2}),
    Case("pp2-vpp2-odd-layers", "odd", {"pipeline": 2, "virtual": 2}),
    Case("pp2-vpp2", "tied", {"pipeline": 2, "virtual": 2}),
    Case("pp2-vpp2-moe-routed", "moe", {"pipeline": 2, "virtual": 2}, "routed"),
    Case("pp2-vpp2-three-batches", "dense", {"pipeline": 2, "virtual": 2}, "three"),
    Case("cp2", "dense", {"context": 2}),
    Case("cp2-moe-routed", "moe", {"context": 2}, "routed"),
    Case("padded-cp2-moe-routed", "moe", {"context": 2}, "routed", policy={"layout": "padded"}),
    Case("cp2-moe-recorded", "moe", {"context": 2}, "recorded"),
    Case("cp2-short", "dense", {"context": 2}, "short"),
    Case("cp2-distributed", "tied", {"context": 2}, optimizer={"distributed": True}),
    Case("ep2", "moe", {"expert": 2}),
    Case("ep2-routed", "moe", {"expert": 2}, "routed"),
    Case("ep2-masked", "moe", {"expert": 2}, "masked"),
    Case("ep2-distributed", "moe", {"expert": 2}, optimizer={"distributed": True}),
    Case("expert-tp2", "moe", {"expert_tensor": 2}),
    Case("padded-tp2", "dense", {"tensor": 2}, policy={"layout": "padded"}),
    Case("padded-cp2", "dense", {"context": 2}, policy={"layout": "padded"}),
    Case("recompute-tp2", "moe", {"tensor": 2}, "routed", policy={"recompute": True}),
    Case("recompute-pp2", "dense", {"pipeline": 2}, policy={"recompute": True}),
    Case("critic-dp2-distributed", "tied", {}, optimizer={"distributed": True}, critic=True),
    Case("critic-tp2", "tied", {"tensor": 2}, critic=True),
    Case("critic-tp2-without-sequence", "dense", {"tensor": 2, "sequence": False}, critic=True),
    Case("critic-pp2", "tied", {"pipeline": 2}, critic=True),
    Case("critic-pp2-vpp2", "dense", {"pipeline": 2, "virtual": 2}, critic=True),
    Case("critic-cp2", "dense", {"context": 2}, critic=True),
    Case("critic-ep2", "moe", {"expert": 2}, critic=True),
]

FOUR = [
    Case("dp2-tp2-distributed", "moe", {"tensor": 2}, optimizer={"distributed": True}),
    Case("tp2-pp2", "dense", {"tensor": 2, "pipeline": 2}),
    Case("tp2-pp2-moe-routed", "moe", {"tensor": 2, "pipeline": 2}, "routed"),
    Case("tp2-cp2-short", "dense", {"tensor": 2, "context": 2}, "short"),
    Case("tp2-cp2-moe-routed", "moe", {"tensor": 2, "context": 2}, "routed"),
    Case("pp2-cp2-glm-routed", "glm", {"pipeline": 2, "context": 2}, "routed"),
    Case("cp2-ep2-routed", "moe", {"context": 2, "expert": 2}, "routed"),
    Case("dp2-tp2-ep2", "moe", {"tensor": 2, "expert": 2}),
    Case("tp2-ep2-expert-tp2", "moe", {"tensor": 2, "expert": 2, "expert_tensor": 2}),
    Case("pp2-ep2", "moe", {"pipeline": 2, "expert": 2}),
    Case("pp2-cp2-tied", "tied", {"pipeline": 2, "context": 2}),
    Case("cp2-ep2-distributed", "moe", {"context": 2, "expert": 2}, optimizer={"distributed": True}),
    Case("dp2-pp2-poisoned-rank", "tied", {"pipeline": 2}, "poison"),
    Case("dp2-pp2-tied-distributed", "tied", {"pipeline": 2}, optimizer={"distributed": True}),
    Case("critic-tp2-cp2", "tied", {"tensor": 2, "context": 2}, critic=True),
]


STARTS = {2: TWO, 4: FOUR}
CASES = [pytest.param(world, case, id=case.name) for world, cases in STARTS.items() for case in cases]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    workload.make_models(folder)
    return folder


@pytest.fixture(scope="module")
def alone(root):
    """What one process computes, made once for each model and variant."""
    known: dict[tuple[str, str, bool, str], dict[str, torch.Tensor]] = {}

    def get(case: Case) -> dict[str, torch.Tensor]:
        dtype = case.policy.get("dtype", "float32")
        key = (case.model, case.variant, case.critic, dtype)
        if key not in known:
            one = Case("alone", case.model, variant=case.variant, critic=case.critic, policy={"dtype": dtype})
            known[key] = workload.run(one, root)
        return known[key]

    return get


@pytest.fixture(scope="module")
def found(root, tmp_path_factory):
    """Where the ranks of a world size left what they found: one start for all its cases."""
    known: dict[int, Path] = {}
    failed: dict[int, AssertionError] = {}

    def get(world: int) -> Path:
        if world in failed:
            raise failed[world]
        if world not in known:
            out = tmp_path_factory.mktemp(f"world{world}")
            # To replace the process groups takes longer than to run a case.
            cases = sorted(STARTS[world], key=lambda case: json.dumps(case.sizes, sort_keys=True))
            arguments = [str(root), str(out), json.dumps([case.to_json() for case in cases])]
            try:
                launch.start(world, Path(__file__).parent / "rank.py", arguments, seconds=240)
            except AssertionError as error:
                failed[world] = error
                raise
            known[world] = out
        return known[world]

    return get


@pytest.mark.parametrize(("world", "case"), CASES)
def test_layouts_equal_one_process(world, case, found, alone, record_property):
    ranks = [load_file(found(world) / f"{case.name}-{rank}.safetensors") for rank in range(world)]
    want = alone(case)
    names: set[str] = set()
    worst = 0.0
    for tensors in ranks:
        for name, value in tensors.items():
            other = want[name]
            worst = max(worst, difference(value, other))
            torch.testing.assert_close(
                value, other, rtol=1e-5, atol=2e-6, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
        names |= tensors.keys()
    assert names == want.keys(), "something that no rank has"
    record_property("largest relative difference", worst)
    if case.variant == "poison":
        assert want["applied"].tolist() == [0.0, 0.0] and not math.isfinite(float(want["norm"][0]))
    else:
        assert want["applied"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("world", STARTS)
def test_ranks_exchange_values_and_refuse_what_cannot_work(world, found):
    """Tried in every layout of a start, see `workload.exchange`, and at its end, see `workload.refusals`."""
    for rank in range(world):
        assert json.loads((found(world) / f"exchange-{rank}.json").read_text()) == []


def test_ranks_without_a_gpu_each_are_skipped_where_there_are_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(pytest.skip.Exception, match="4 ranks need 4 GPUs, this host has 3"):
        launch.start(4, Path("no-such-script.py"), [], seconds=1)


def difference(value: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference over the largest entry."""
    scale = other.double().abs().nan_to_num().max().clamp(min=1e-12)
    return float(((value.double() - other.double()).nan_to_num().abs() / scale).max())
