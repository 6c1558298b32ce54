"""The plan against what a tiny model really allocates: weights, gradients, optimizer state, activations."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from vime_trainer import models, plan
from vime_trainer.cli import main
from vime_trainer.megatron import ParallelConfig
from vime_trainer.models import HfConfig
from vime_trainer.optim import Optimizer, OptimizerSettings
from vime_trainer.packed import pack
from vime_trainer.plan import CriticWorkload, Kernels, Workload, make_plan
from vime_trainer.policy import Policy
from vime_trainer.value import ValueModel

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 112,
    "vocab_size": 300,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
GLM = DENSE | {
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": True,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
QWEN3_30B = MOE | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
}
GLM_45 = GLM | {
    "hidden_size": 5120,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3,
    "vocab_size": 151552,
}
CPU_KERNELS = Kernels(fused_mlp=False, fused_norm=False, grouped_attention=False)
LENGTHS = [40] * 4


def folder(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def saved_bytes(policy, loss):
    """Bytes of every storage that the graph holds, without parameters."""
    known = {param.untyped_storage().data_ptr() for param in policy.parameters().values()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss()
    return sum(size for size, _ in kept.values())


def one_stage(config, **workload):
    made = make_plan(
        HfConfig(config), ParallelConfig(), 1, Workload(micro_batch_tokens=sum(LENGTHS), **workload), CPU_KERNELS
    )
    return made.stages[0]


def test_public_names():
    assert plan.__all__ == [
        "GPU_KERNELS",
        "CriticWorkload",
        "Kernels",
        "Layout",
        "Plan",
        "StageMemory",
        "Workload",
        "make_plan",
        "render",
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [DENSE, MOE, GLM], ids=["dense", "moe", "glm"])
def test_bytes_are_those_of_a_real_step(config, dtype, tmp_path):
    policy = Policy.from_config(folder(config, tmp_path), dtype)
    optimizer = Optimizer(policy, OptimizerSettings())
    expected = one_stage(config, dtype=dtype)
    assert expected.weights == sum(tensor.nbytes for tensor in policy.weights().values())

    batch = pack([torch.randint(0, 300, (length,)) for length in LENGTHS])
    found = []
    activations = saved_bytes(policy, lambda: found.append(policy(batch).logprobs.sum()))
    assert activations == pytest.approx(expected.activations, rel=0.05)

    found[0].backward()
    grads = {param.main_grad.data_ptr(): param.main_grad.nbytes for param in policy.parameters().values()}
    assert sum(grads.values()) == pytest.approx(expected.gradients, rel=0.05)
    optimizer.step()
    state = sum(tensor.nbytes for tensor in optimizer.state_tensors().values())
    assert state == pytest.approx(expected.optimizer, rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [DENSE | {"tie_word_embeddings": True}, MOE], ids=["dense", "moe"])
def test_bytes_of_critic_and_reference_are_those_of_real_ones(config, dtype, tmp_path):
    path = folder(config, tmp_path)
    workload = Workload(micro_batch_tokens=sum(LENGTHS), dtype=dtype)
    made = make_plan(
        HfConfig(config), ParallelConfig(), 1, workload, CPU_KERNELS, reference=True, critic=CriticWorkload()
    )
    expected = made.others["critic"][0]
    critic = ValueModel(models.read_config(path), dtype, "packed", False)
    critic.randomize(0)
    optimizer = Optimizer(critic, OptimizerSettings())
    assert expected.weights == sum(tensor.nbytes for tensor in critic.weights().values())
    assert expected.parameters == sum(param.numel() for param in critic.parameters().values())
    batch = pack([torch.randint(0, 300, (length,)) for length in LENGTHS])
    found = []
    assert saved_bytes(critic, lambda: found.append(critic(batch).values.sum())) == pytest.approx(
        expected.activations, rel=0.05
    )
    found[0].backward()
    assert sum(param.main_grad.nbytes for param in critic.parameters().values()) == expected.gradients
    optimizer.step()
    state = sum(tensor.nbytes for tensor in optimizer.state_tensors().values())
    assert state == pytest.approx(expected.optimizer, rel=0.05)

    other = Policy.from_config(path, dtype)
    kept = made.others["reference"][0]
    assert kept.total == kept.weights == sum(tensor.nbytes for tensor in other.weights().values())
    assert saved_bytes(other, lambda: other.run([batch], [batch.positions > 0])) == 0
    assert all(param.grad is None and not hasattr(param, "main_grad") for param in other.parameters().values())
    # Passes come one after the other, the rest is there all the time.
    (policy,) = made.stages
    assert made.total(0) == policy.total + kept.weights + expected.weights + expected.gradients + expected.optimizer


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_recompute_keeps_the_inputs_of_layers(config, tmp_path):
    from vime_trainer.models import read_config

    policy = Policy(read_config(folder(config, tmp_path)), "float32", "packed", recompute=True)
    policy.randomize(0)
    batch = pack([torch.randint(0, 300, (length,)) for length in LENGTHS])
    rotary = 2 * sum(LENGTHS) * 32 / 2 * 4  # sines and cosines are no inputs of a layer, but are kept
    activations = saved_bytes(policy, lambda: policy(batch)) + rotary
    expected = one_stage(config, dtype="float32", recompute=True)
    assert activations == pytest.approx(expected.activations, rel=0.05)
    assert expected.activations < 0.2 * one_stage(config, dtype="float32").activations


def test_known_models_have_their_known_sizes():
    made = make_plan(HfConfig(QWEN3_30B), ParallelConfig(expert=8), 8)
    assert made.parameters == 30_532_122_624
    assert made.active == pytest.approx(3.35e9, rel=0.01)
    glm = make_plan(HfConfig(GLM_45), ParallelConfig(tensor=8, pipeline=4, expert=16), 64)
    assert glm.parameters == pytest.approx(353e9, rel=0.01)
    assert glm.active == pytest.approx(33.6e9, rel=0.01)


def test_arithmetic_is_six_operations_a_parameter_and_token_plus_attention():
    made = make_plan(HfConfig(DENSE), ParallelConfig(), 1, Workload(micro_batch_tokens=64, sequence_length=64))
    matrices = made.parameters - 300 * 64 - 3 * (2 * 64 + 2 * 32) - 64  # without embedding and norms
    attention = 3 * 3 * 4 * 128 * 64 // 2
    assert made.step_flops == 64 * (6 * matrices + attention)
    assert made.flops.executed(recompute=True) > made.flops.executed(recompute=False) > made.flops.training


@pytest.mark.parametrize(
    "config", [DENSE, MOE, GLM, DENSE | {"tie_word_embeddings": True}], ids=["dense", "moe", "glm", "tied"]
)
def test_parts_are_what_the_weight_tables_give_each_rank(config):
    family = models.family_of(HfConfig(config))
    arch = family.architecture(HfConfig(config))
    experts = {"expert": 4, "expert_tensor": 2} if arch.moe_layers else {}
    made = make_plan(HfConfig(config), ParallelConfig(tensor=2, pipeline=3, **experts), 24)
    place = models.Place(tensor_size=2, **{f"{name}_size": size for name, size in experts.items()})
    for stage in made.stages:
        layers = made.layout.stage_layers(stage.stage)
        held = 0
        for entry in models.expand(family.weights, arch):
            on_first, on_last = stage.stage == 0, stage.stage == 2
            embedding = "embedding" in entry.megatron
            once = (on_first or (on_last and arch.tied)) if embedding else on_last
            if (entry.layer in layers or (entry.layer is None and once)) and not entry.float32:
                held += math.prod(models.local_shape(entry, arch, place))
        assert stage.parameters == held


def _dense(config):
    """Parameters outside of routed experts."""
    layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    experts = config.get("num_experts", config.get("n_routed_experts"))
    routed = layers * experts * 3 * config["hidden_size"] * config["moe_intermediate_size"]
    return make_plan(HfConfig(config), ParallelConfig(), 1).parameters - routed


def test_state_is_shared_offloaded_or_whole():
    def worst(gpus=8, parallel=None, **workload):
        return make_plan(HfConfig(QWEN3_30B), parallel or ParallelConfig(), gpus, Workload(**workload)).worst

    whole = worst()
    assert worst(distributed=True).optimizer == pytest.approx(whole.optimizer / 8)
    spread = ParallelConfig(expert=4)
    shared, kept = worst(parallel=spread, distributed=True), worst(parallel=spread)
    dense = _dense(QWEN3_30B)
    assert shared.optimizer == pytest.approx(12 * (dense / 8 + (kept.parameters - dense) / 2))
    offloaded = worst(cpu_offload=True)
    assert offloaded.optimizer == 0 and offloaded.host > whole.optimizer


def test_early_stages_keep_more_micro_batches():
    layout = ParallelConfig(pipeline=4)
    stages = make_plan(HfConfig(QWEN3_30B), layout, 4, Workload(step_tokens=10**6)).stages
    assert [stage.in_flight for stage in stages] == [4, 3, 2, 1]
    assert [s.in_flight for s in make_plan(HfConfig(QWEN3_30B), layout, 4, Workload()).stages] == [1, 1, 1, 1]
    chunked = make_plan(HfConfig(QWEN3_30B), ParallelConfig(pipeline=4, virtual=2), 4, Workload(step_tokens=10**6))
    assert [stage.in_flight for stage in chunked.stages] == [5.5, 4.5, 3.5, 2.5]
    assert chunked.layout.stage_layers(1) == [*range(6, 12), *range(30, 36)]


def test_parts_of_micro_batches_stay_parts_in_json():
    made = make_plan(HfConfig(QWEN3_30B), ParallelConfig(pipeline=4, virtual=2), 4, Workload(step_tokens=10**6))
    assert [stage["in_flight"] for stage in made.to_dict()["stages"]] == [5.5, 4.5, 3.5, 2.5]


def test_layers_that_do_not_divide_go_to_the_middle():
    stages = make_plan(HfConfig(GLM_45), ParallelConfig(pipeline=8), 8).stages
    assert [stage.layers for stage in stages] == [11, 11, 12, 12, 12, 12, 11, 11]


def test_context_and_tensor_parallelism_cut_activations():
    def activations(**sizes):
        return make_plan(HfConfig(QWEN3_30B), ParallelConfig(**sizes), 4, Workload()).worst.activations

    assert activations(tensor=4) == pytest.approx(activations() / 4, rel=0.02)
    # Keys and values of all ranks are gathered.
    assert activations() / 4 < activations(context=4) < activations() / 3


@pytest.mark.parametrize(
    ("sizes", "gpus", "fault"),
    [
        ({"tensor": 3}, 3, "parallel.tensor: 3 .* 4 key and value heads; valid: 1, 2, 4"),
        ({"pipeline": 64}, 64, "parallel.pipeline: 64; valid: 1 to 48 for 48 layers"),
        ({"pipeline": 8, "virtual": 7}, 8, "parallel.virtual: 7; valid: 1 to 6 for 48 layers"),
        ({"virtual": 2}, 4, "parallel.virtual: 2 needs pipeline"),
        ({"expert": 3}, 3, "parallel.expert: 3 .* 128 experts"),
        ({"tensor": 4}, 6, "parallel.tensor: 4 does not divide the 6 GPUs; valid: 1, 2, 3, 6"),
        ({"pipeline": 2, "context": 4}, 4, "parallel.context: 4 does not divide the 2 GPUs that are left of 4"),
        ({"expert": 8}, 12, "parallel.expert: 8 does not divide the 12 GPUs"),
        ({"tensor": 2, "sequence": False}, 2, "parallel.sequence"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(sizes, gpus, fault):
    with pytest.raises(ValueError, match=fault):
        make_plan(HfConfig(QWEN3_30B), ParallelConfig(**sizes), gpus)


def test_the_command_reads_a_runs_file_and_prints_a_table_or_json(tmp_path, capsys):
    folder(MOE, tmp_path)
    run = tmp_path / "rl.toml"
    run.write_text(
        f'model = "{tmp_path}"\ndtype = "bfloat16"\nrecompute = true\n[batch]\ntoken_budget = 320\n'
        "[parallel]\nexpert = 2\n[optimizer]\ndistributed = true\n"
    )
    assert main(["plan", str(run), "--gpus", "4", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["layout"]["expert"] == 2 and made["layout"]["data"] == 4
    assert made["workload"]["recompute"] and made["workload"]["micro_batch_tokens"] == 320
    assert made["workload"]["step_tokens"] == 4 * 320
    assert main(["plan", str(run), "--gpus", "4", "--gpu_gib", "0.001"]) == 0
    shown = capsys.readouterr().out
    assert "worst: stage 0" in shown and "DOES NOT FIT" in shown
    assert main(["plan", str(tmp_path), "--gpus", "3", "--parallel.expert", "3"]) == 1
    assert "parallel.expert: 3 does not divide the model's 8 experts" in capsys.readouterr().err


def test_the_command_counts_the_models_that_a_run_has(tmp_path, capsys):
    folder(MOE, tmp_path)
    (tmp_path / "critic").mkdir()
    folder(DENSE, tmp_path / "critic")
    run = tmp_path / "rl.toml"
    run.write_text(
        f'model = "{tmp_path}"\n[algorithm]\nname = "ppo"\nkl = {{ coefficient = 0.1 }}\n[optimizer]\ndistributed = true\n'
        f'[critic]\nmodel = "{tmp_path}/critic"\nepochs = 2\n[critic.optimizer]\ndistributed = true\ncpu_offload = true\n'
    )
    assert main(["plan", str(run), "--gpus", "2", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    (critic,), (reference,), (policy,) = made["others"]["critic"], made["others"]["reference"], made["stages"]
    assert reference["parameters"] == policy["parameters"] and reference["gradients"] == 0
    # The folder's own model, without a head over the vocabulary.
    assert critic["parameters"] == make_plan(HfConfig(DENSE), ParallelConfig(), 1).parameters - 300 * 64 + 64
    assert critic["optimizer"] == 0 < critic["host"] and policy["host"] == 0 < policy["optimizer"]
    assert made["totals"][0] > policy["total"] + reference["total"]
    flops = make_plan(HfConfig(DENSE), ParallelConfig(), 1, Workload(16384)).flops
    forward = flops.matrices + flops.attention + 2 * 64
    assert made["flops"]["critic"] == pytest.approx(2 * 16384 * 7 * forward)
    assert made["flops"]["reference"] == pytest.approx(made["flops"]["step"] / 3)
    assert main(["plan", str(run)]) == 0
    shown = capsys.readouterr().out
    assert [
        line.split()[:2] for line in shown.splitlines() if line[:8].strip() in ("policy", "critic", "together")
    ] == [
        ["policy", "0"],
        ["critic", "0"],
        ["together", "0"],
    ]
    run.write_text(f'model = "{tmp_path}"\n[algorithm]\nname = "grpo"\n')
    assert main(["plan", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["others"] == {}


@pytest.mark.parametrize(
    ("config", "expert_tensor", "fault"),
    [
        (MOE, 4, "parallel.expert_tensor: 4 leaves 12 of the model's 48 columns .* valid: 1, 2, 3, 6$"),
        (MOE | {"moe_intermediate_size": 20}, 1, "moe_intermediate_size: 20, but .* multiple of 8"),
        (MOE | {"hidden_size": 68}, 1, "hidden_size: 68, but .* multiple of 8"),
    ],
)
def test_widths_that_the_grouped_product_of_a_gpu_does_not_take_are_refused(config, expert_tensor, fault, monkeypatch):
    from vime_trainer.megatron import _experts

    layout = ParallelConfig(expert_tensor=expert_tensor)
    with pytest.raises(ValueError, match=fault):
        make_plan(HfConfig(config), layout, expert_tensor)
    # The loop over experts takes any width.
    make_plan(HfConfig(config), layout, expert_tensor, Workload(dtype="float32"))
    if expert_tensor == 1:
        Policy(HfConfig(config), "bfloat16", "packed", False)
        monkeypatch.setattr(_experts, "_takes_grouped", lambda rows: rows.dtype == torch.bfloat16)
        with pytest.raises(ValueError, match=fault):
            Policy(HfConfig(config), "bfloat16", "packed", False)
        Policy(HfConfig(config), "float32", "packed", False)


def test_a_run_without_a_model_is_refused(tmp_path, capsys):
    run = tmp_path / "rl.toml"
    run.write_text("seed = 1\n")
    assert main(["plan", str(run)]) == 1
    assert "no key 'model'" in capsys.readouterr().err


def test_every_number_of_a_stage_is_in_json():
    made = make_plan(HfConfig(MOE), ParallelConfig(), 1)
    names = {field.name for field in dataclasses.fields(plan.StageMemory)}
    assert set(made.to_dict()["stages"][0]) == names | {"total"}


def test_the_readme_shows_what_the_command_prints(tmp_path, capsys):
    folder(QWEN3_30B | {"tie_word_embeddings": False}, tmp_path)
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    shown = readme.partition("$ vime-trainer plan Qwen3-30B-A3B ")[2].partition("\n```")[0]
    options, _, printed = shown.partition("\n")
    assert main(["plan", str(tmp_path), *options.split()]) == 0
    assert capsys.readouterr().out.strip() == printed.strip()
