"""Global layer numbers under pipeline and virtual pipeline stages: dense, dense, dense, then four MoE layers."""

import os
import subprocess
import sys
from pathlib import Path

RANK = """
import sys
import torch
import tiny
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from vime_r3.megatron import attach

store, rank = sys.argv[1], int(sys.argv[2])
groups = tiny.start(store, rank, 2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
next(groups)
layout = PipelineParallelLayerLayout.from_str("Ettt|tt|t|tL", 2)
ids = tiny.random_ids(6, 4)
for stage in range(2):
    model = tiny.build(
        num_layers=7, moe_layer_freq=[0, 0, 0, 1, 1, 1, 1], pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout, pipeline_dtype=torch.float32,
        pre=(rank, stage) == (0, 0), post=(rank, stage) == (1, 1), vp_stage=stage,
    )
    seen = {}
    for layer in model.decoder.layers:
        if hasattr(layer.mlp, "router"):
            layer.mlp.router.register_forward_hook(
                lambda _m, _i, out, number=layer.layer_number - 1: seen.update({number: out[1]}))
    replay = attach(model)
    model.set_input_tensor(torch.randn(6, 1, tiny.HIDDEN))
    with replay.use(ids, layer_ids=(3, 4, 5, 6)):
        tiny.run(model, torch.zeros(1, 6, dtype=torch.int64))
    for number, chosen in seen.items():
        forced = torch.zeros(6, tiny.EXPERTS, dtype=torch.bool).scatter(1, ids[:, number - 3], True)
        assert torch.equal(chosen, forced), number
    print("stage", stage, "layers", *sorted(seen))
next(groups, None)
"""


def test_every_stage_replays_its_own_layers(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(tmp_path / "store"), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [process.communicate(timeout=100) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, errors) in zip(ranks, answers, strict=True):
        assert process.returncode == 0, errors
    assert answers[0][0].splitlines() == ["stage 0 layers", "stage 1 layers 5"]
    assert answers[1][0].splitlines() == ["stage 0 layers 3 4", "stage 1 layers 6"]
