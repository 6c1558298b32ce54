"""The README's code runs as it stands, between a stand-in for vLLM and a tiny Megatron model."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import torch
from tiny import build, run

README = Path(__file__).parents[2] / "README.md"


class Engine:
    """Answers as vllm.LLM does, for a model of 128 experts in 48 layers."""

    def __init__(self, model, enable_return_routed_experts):
        assert enable_return_routed_experts

    def generate(self, prompts, sampling):
        random = np.random.default_rng(0)
        for prompt in prompts:
            rows = len(prompt["prompt_token_ids"]) + sampling.max_tokens - 1
            ids = random.random((rows, 48, 128)).argsort(axis=-1)[..., :8].astype(np.uint8)
            answer = types.SimpleNamespace(routed_experts=ids, token_ids=[1] * sampling.max_tokens)
            yield types.SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[answer])


def test_every_block_of_python(tmp_path, monkeypatch, capsys):
    sampling = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=Engine, SamplingParams=sampling))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) == 3

    def forward(model, lengths):
        tokens = torch.arange(sum(lengths))[None] % 32
        return run(model, tokens, tokens).sum()

    model = build(num_layers=2, num_moe_experts=128, moe_router_topk=8)
    names = {"model": model, "forward": forward}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["routes-0.bin", "routes-1.bin"]
    assert names["lengths"] == [67, 65]
    flips = eval(capsys.readouterr().out)
    assert set(flips) == {0, 1} and min(flips.values()) > 100
