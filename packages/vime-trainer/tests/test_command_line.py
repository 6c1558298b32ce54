"""The commands as a user runs them, and what importing the package costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from tests_support import tiny_moe_folder

import vime_trainer
from vime_trainer import checkpoint, cli, megatron, models, optim, policy, sft
from vime_trainer.policy import Policy


def run(argv, capsys):
    status = cli.main([str(word) for word in argv])
    captured = capsys.readouterr()
    return status, captured.out.strip(), captured.err.strip()


def test_init_sft_export_and_logprobs(tmp_path, capsys):
    source = tiny_moe_folder(tmp_path / "source")
    made = tmp_path / "made"
    options = ["--model-config-file", source / "config.json", "--output", made, "--tokenizer", source, "--seed", 7]
    assert run(["init", *options], capsys)[:2] == (0, str(made))
    assert (made / "tokenizer.json").is_file()
    status, _, error = run(["init", *options], capsys)
    assert status == 1 and error.endswith(f"output: {made} exists already")

    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "<bos>ab=", "response": "ba"}) + "\n")
    config = tmp_path / "sft.toml"
    config.write_text(
        f'model = "{made}"\noutput = "{tmp_path / "run"}"\nsteps = 2\nbatch_size = 3\n[data]\nfiles = ["{rows}"]\n'
        "[optimizer]\nlearning_rate = 0.01\n[metrics]\ntensorboard = false\n"
    )
    status, out, error = run(["sft", "--config", config], capsys)
    assert (status, out) == (0, str(tmp_path / "run" / "final")), error

    exported = tmp_path / "exported"
    command = ["export", "--model", made, "--checkpoint", tmp_path / "run" / "checkpoints", "--output", exported]
    assert run(command, capsys)[:2] == (0, str(exported))
    assert (exported / "model.safetensors").read_bytes() == (
        tmp_path / "run" / "final" / "model.safetensors"
    ).read_bytes()

    data = tmp_path / "tokens.jsonl"
    data.write_text('{"tokens": [1, 3, 4, 5]}\n\n{"tokens": [1, 5], "temperature": 0.5}\n{"tokens": [2]}\n')
    status, out, _ = run(["logprobs", "--model", exported, "--data", data, "--batch-tokens", 5], capsys)
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [len(line["logprobs"]) for line in lines] == [4, 2, 1]
    assert all(line["logprobs"][0] is None for line in lines)
    from vime_trainer.packed import pack

    want = Policy.from_hf(exported)(pack([[1, 5]], 0.5)).logprobs[1].item()
    assert lines[1]["logprobs"][1] == pytest.approx(want, abs=1e-6)
    data.write_text('{"tokens": []}\n')
    status, _, error = run(["logprobs", "--model", exported, "--data", data], capsys)
    assert status == 1 and "tokens.jsonl:1: tokens must be a list" in error


def test_faults_end_with_one_line_that_names_them(tmp_path, capsys):
    status, _, error = run(["sfd"], capsys)
    assert status == 2 and error.startswith("vime-trainer: unknown command 'sfd'; did you mean 'sft'?")
    with pytest.raises(SystemExit) as exit_info:
        run(["init", "--model-config-fil", "x", "--output", "y"], capsys)
    assert exit_info.value.code == 2
    assert "did you mean 'model_config_file'?" in capsys.readouterr().err
    status, _, error = run(["init", "--model-config-file", tmp_path / "no", "--output", tmp_path / "o"], capsys)
    assert status == 1 and error == f"vime-trainer init: no config.json at {tmp_path / 'no'}"
    status, _, error = run(
        [
            "export",
            "--model",
            tiny_moe_folder(tmp_path / "m"),
            "--checkpoint",
            tmp_path / "none",
            "--output",
            tmp_path / "o",
        ],
        capsys,
    )
    assert status == 1 and f"{tmp_path / 'none'}: no checkpoint" in error
    assert run([], capsys)[0] == 2 and run(["--help"], capsys)[0] == 0
    assert run(["--version"], capsys)[1] == vime_trainer.__version__


def fresh(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ | environment
    )


def test_help_printed_configurations_and_refused_ones_load_nothing_heavy(tmp_path):
    (tmp_path / "run.toml").write_text(f'model = "{tmp_path}"\n[algorithm]\nname = "ppo"\n')
    base, served = ["--model", "m", "--output", "o"], ["--buffer", "127.0.0.1:1", "--router", "127.0.0.1:2"]
    commands = {
        0: [
            ["--help"],
            *([name, "--help"] for name in cli.COMMANDS),
            ["rl", *base, *served, "--print-config"],
            ["sft", *base, "--data.files", '["rows"]', "--steps", "1", "--batch-size", "1", "--print-config"],
            ["plan", str(tmp_path / "run.toml"), "--print-config"],
        ],
        1: [["rl", *base, *served, "--ranks", "3", "--parallel.tensor", "2"]],
        2: [
            *([name, "--outputs", "o"] for name in cli.COMMANDS),
            ["rl", *base, "--buffer", "127.0.0.1:1"],
            ["rl", *base, *served, "--algorithm.name", "grpa"],
            ["rl", *base, *served, "--algorithm.correction", "icebox"],
            ["sft", *base, "--data.files", '["rows"]'],
        ],
    }
    code = f"""
import sys, vime_trainer, vime_trainer.cli as cli
for want, lines in {commands!r}.items():
    for line in lines:
        try:
            status = cli.main(line)
        except SystemExit as end:
            status = end.code
        assert status == want, (line, status)
print([m for m in ("torch", "megatron", "transformers", "tokenizers", "tensorboard", "vllm", "ray") if m in sys.modules])
"""
    done = fresh(code)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout[-500:] + done.stderr
    assert "did you mean 'grpo'?" in done.stderr and "did you mean 'icepop'?" in done.stderr


def test_the_trainer_never_imports_the_engine_or_the_launcher():
    code = (
        "import sys, vime_trainer.policy, vime_trainer.sft;"
        "print([m for m in ('vllm', 'ray', 'vime_rollout', 'vime_buffer', 'vime_launch') if m in sys.modules])"
    )
    done = fresh(code)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_world_that_the_sizes_do_not_divide_is_refused_by_name():
    done = fresh(
        "from vime_trainer.megatron import ParallelConfig, initialize; initialize(ParallelConfig(tensor=2))",
        WORLD_SIZE="3",
    )
    assert done.returncode != 0
    assert done.stderr.strip().endswith("parallel.tensor: 2 does not divide the 3 trainer processes")


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ({"pipeline": 3}, 4, r"parallel\.pipeline: 3 does not divide the 4 trainer processes"),
        ({"pipeline": 2, "context": 4}, 4, r"parallel\.context: 4 does not divide the 4 trainer processes"),
        ({"expert": 4}, 2, r"parallel\.expert: 4 does not divide the 2 trainer processes"),
        ({"expert_tensor": 2, "expert": 2}, 2, r"parallel\.expert: 2 does not divide"),
    ],
)
def test_sizes_that_no_world_of_this_many_has(sizes, world, message):
    with pytest.raises(ValueError, match=message):
        megatron.ParallelConfig(**sizes).check_world(world)


def test_sizes_that_fit_no_model():
    with pytest.raises(ValueError, match=r"parallel\.virtual: 2 needs pipeline stages"):
        megatron.ParallelConfig(virtual=2)
    with pytest.raises(ValueError, match=r"parallel\.virtual: 2 stages of 2 model chunks are too many for 3 layers"):
        megatron.ParallelConfig(pipeline=2, virtual=2).split_layers(3)
    with pytest.raises(ValueError, match="Extra inputs"):
        megatron.ParallelConfig(tensors=2)


@pytest.mark.parametrize(
    ("pipeline", "virtual", "layers", "want"),
    [(1, 1, 7, [7]), (2, 2, 8, [2, 2, 2, 2]), (2, 2, 9, [2, 3, 2, 2]), (4, 1, 94, [23, 24, 24, 23]), (2, 1, 5, [3, 2])],
)
def test_layers_left_over_go_to_the_middle(pipeline, virtual, layers, want):
    assert megatron.ParallelConfig(pipeline=pipeline, virtual=virtual).split_layers(layers) == want


def test_the_stand_ins_for_a_gpu_are_only_there_without_one():
    megatron.initialize()
    if torch.cuda.is_available():
        assert isinstance(torch.cuda.current_device(), int)
        return
    assert torch.cuda.current_device() == torch.device("cpu")
    with megatron.cuda_names():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_public_names():
    assert vime_trainer.__all__ == ["__version__"]
    assert list(cli.COMMANDS) == ["init", "sft", "rl", "plan", "export", "logprobs"]
    assert megatron.__all__ == [
        "Coordinates",
        "Parallel",
        "ParallelConfig",
        "TransformerEngine",
        "build_chunks",
        "build_model",
        "cuda_names",
        "device",
        "head_weight",
        "initialize",
        "parallel",
        "routers",
        "weights",
    ]
    assert policy.__all__ == ["DTYPES", "Policy", "Transformer", "token_logprobs"]
    assert optim.__all__ == ["Optimizer", "OptimizerSettings", "StepResult", "learning_rate"]
    assert checkpoint.__all__ == [
        "POLICY",
        "CheckpointError",
        "CheckpointSettings",
        "RunState",
        "Saver",
        "Trained",
        "find_latest",
        "list_steps",
        "load_checkpoint",
        "load_models",
        "path_of",
        "save_checkpoint",
        "start_point",
    ]
    assert sft.__all__ == [
        "Cursor",
        "DataError",
        "DataSettings",
        "Example",
        "Order",
        "SftSettings",
        "SftStep",
        "micro_batches",
        "read_examples",
        "run_sft",
        "train_step",
    ]
    assert [family.name for family in models.FAMILIES] == ["qwen3", "qwen3_moe", "glm4_moe"]


def test_fine_tuning_ends_with_its_parent(tmp_path):
    """The parent starts `sft` on a run that would last for hours, and ends when the first step is on disk."""
    folder = tiny_moe_folder(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab", "response": "ba"}\n')
    options = {
        "model": folder,
        "output": tmp_path / "run",
        "data.files": f'["{tmp_path / "rows.jsonl"}"]',
        "steps": 10_000_000,
        "batch_size": 1,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    parent = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'vime_trainer', 'sft', '--exit-with-parent', *{words!r}])\n"
        f"end = time.monotonic() + 90; path = {str(tmp_path / 'run' / 'metrics.jsonl')!r}\n"
        "while not (os.path.exists(path) and os.path.getsize(path)) and time.monotonic() < end: time.sleep(0.05)\n"
        "print(child.pid, flush=True); os._exit(0 if time.monotonic() < end else 1)\n"
    )
    done = fresh(parent)
    assert done.returncode == 0, done.stderr
    pid = int(done.stdout.split()[-1])
    end = time.monotonic() + 15
    while time.monotonic() < end and not _ended(pid):
        time.sleep(0.05)
    assert _ended(pid)


def _ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
