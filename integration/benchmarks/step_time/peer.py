"""The same job by TRL's GRPOTrainer with vLLM in its own process: ``peer.py JOB_FOLDER STEPS``; a JSON line after every step that
counts, of all steps so far.

The folder holds job.json, model/ and prompts.jsonl, as run.py writes them. Needs trl, datasets, vllm and a GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "rewards"))


def main(folder: Path, steps: int) -> None:
    import torch
    from datasets import Dataset
    from figures import SKIPPED
    from step_time_reward import value
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    job = json.loads((folder / "job.json").read_text())
    ends: list[float] = []
    differences: list[float] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            self._end()

        def on_step_end(self, *args, **kwargs):
            self._end()
            print(f"step {len(ends) - 1}: {ends[-1] - ends[-2]:.2f} s", file=sys.stderr, flush=True)

        def on_log(self, *args, logs=None, **kwargs):
            found = (logs or {}).get("sampling/sampling_logp_difference/mean")
            if found is not None:
                differences.append(float(found))
            tell()

        @staticmethod
        def _end():
            torch.cuda.synchronize()
            ends.append(time.perf_counter())

    def tell() -> None:
        seconds = [round(after - before, 3) for before, after in zip(ends, ends[1:], strict=False)]
        kept = seconds[SKIPPED:]
        if not kept:
            return
        step = statistics.median(kept)
        figures = {
            "seconds": step, "steps": len(kept), "all_seconds": seconds,
            "generated_tokens_per_second": round(rollouts * job["new_tokens"] / step),
            "train_rollout_logprob_abs_diff/mean": statistics.median(differences) if differences else None,
            "torch_peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        }  # fmt: skip
        print(json.dumps(figures), flush=True)

    rollouts = job["groups"] * job["group_size"]
    config = GRPOConfig(
        output_dir=str(folder / "peer"), save_strategy="no", report_to=[], logging_steps=1, max_steps=steps, bf16=True,
        per_device_train_batch_size=job["micro_batch"], gradient_accumulation_steps=rollouts // job["micro_batch"],
        num_generations=job["group_size"], max_completion_length=job["new_tokens"], temperature=1.0, beta=0.0,
        generation_kwargs={"ignore_eos": True}, learning_rate=1e-6, max_grad_norm=1.0, gradient_checkpointing=False,
        use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(str(folder / "model"), dtype=torch.bfloat16, attn_implementation="sdpa"),
        args=config,
        reward_funcs=lambda completions, **_: [value(text) for text in completions],
        train_dataset=Dataset.from_list([json.loads(line) for line in (folder / "prompts.jsonl").open()]),
        processing_class=AutoTokenizer.from_pretrained(str(folder / "model"), padding_side="left"),
        callbacks=[Watch()],
    )
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
