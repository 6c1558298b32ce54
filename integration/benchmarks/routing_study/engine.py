"""One vLLM engine in a process of its own: a JSON line a request on stdin, one an answer on stdout, all else on stderr."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from typing import Any

import numpy as np

_FLAGS = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
}


class Server:
    """An engine and what can be asked of it; every method answers with values for JSON and writes arrays to `save`."""

    def __init__(self, options: argparse.Namespace) -> None:
        for name, value in _FLAGS.items():
            os.environ.setdefault(name, value)
        # Hooks of a model need it in this process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if options.eager else "1"
        import torch
        from vllm import LLM

        arguments: dict[str, Any] = {
            "model": options.model,
            "dtype": "bfloat16",
            "seed": 0,
            "max_model_len": 1024,
            "max_num_seqs": 256,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "enable_prefix_caching": False,
            "logprobs_mode": "processed_logprobs",
            "hf_overrides": {"head_dtype": "float32"},
            "disable_log_stats": True,
            "enforce_eager": options.eager or not torch.cuda.is_available(),
            "kv_cache_memory_bytes": int(options.cache_gib * 2**30),
        }
        if torch.cuda.is_available():
            arguments["gpu_memory_utilization"] = 0.12  # up to five engines share the GPU
        if options.capture:
            arguments["enable_return_routed_experts"] = True
        self.capture = options.capture
        self.llm = LLM(**arguments)

    def generate(self, data: str, new: int, save: str = "") -> dict[str, Any]:
        """Samples `new` tokens for each of `prompts` and says how fast; saves tokens, log-probs, routes."""
        prompts = np.load(data)["prompts"]
        started = time.perf_counter()
        results = self._run(prompts, new, logprobs=0)
        seconds = time.perf_counter() - started
        answers = [result.outputs[0] for result in results]
        count = sum(len(answer.token_ids) for answer in answers)
        if save:
            kept = {
                "tokens": np.stack([[*prompt, *one.token_ids] for prompt, one in zip(prompts, answers, strict=True)]),
                "logprobs": np.array([_sampled(answer) for answer in answers]),
            }
            if self.capture:
                kept["routes"] = np.stack([np.asarray(answer.routed_experts) for answer in answers])
            np.savez(save, **kept)
        return {"tokens": count, "seconds": round(seconds, 3), "tokens_per_second": round(count / seconds, 1)}

    def score(self, data: str, count: int, save: str) -> dict[str, Any]:
        """Log-probs and routes of the first `count` sequences' tokens, by prefill."""
        np.savez(save, **self._scores(np.load(data)["tokens"][:count]))
        return {}

    def layers(self, data: str, save: str) -> dict[str, Any]:
        """What every layer puts out for the first sequence; an eager engine only."""
        store: dict[str, np.ndarray] = {}
        self.llm.apply_model(lambda model: _watch(model, store))
        sequences = np.load(data)["tokens"][:1]
        scores = {name: value[0] for name, value in self._scores(sequences).items()}
        kept = {name: value for name, value in store.items() if len(value) == sequences.shape[1]}
        np.savez(save, **kept, **scores)
        return {"activations": len(kept)}

    def _run(self, prompts: np.ndarray, new: int, **wanted: int) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False, **wanted)
        return self.llm.generate([{"prompt_token_ids": one.tolist()} for one in prompts], sampling, use_tqdm=False)

    def _scores(self, sequences: np.ndarray) -> dict[str, np.ndarray]:
        results = self._run(sequences, 1, prompt_logprobs=0)
        found = [
            [at[token].logprob for at, token in zip(result.prompt_logprobs[1:], sequence[1:].tolist(), strict=True)]
            for result, sequence in zip(results, sequences, strict=True)
        ]
        scores = {"logprobs": np.array(found)}
        if self.capture:
            rows = sequences.shape[1] - 1
            scores["routes"] = np.stack([np.asarray(result.outputs[0].routed_experts)[:rows] for result in results])
        return scores


def _sampled(answer: Any) -> list[float]:
    values = answer.logprobs
    if hasattr(values, "start_indices"):  # vLLM's flat form
        return [values.logprobs[start] for start in values.start_indices]
    return [at[token].logprob for at, token in zip(values, answer.token_ids, strict=True)]


def _watch(model: Any, store: dict[str, np.ndarray]) -> None:
    """Keeps the last output of each layer, attention and feed-forward part, float32 [tokens, hidden]."""

    def keep(name: str, module: Any, whole: bool = False) -> None:
        def hook(_: Any, __: Any, out: Any) -> None:
            # A layer hands on its output and the residual apart; their sum is what the next one sees.
            value = out[0].float() + out[1].float() if whole else out[0] if isinstance(out, tuple) else out
            store[name] = value.detach().float().cpu().numpy()

        module.register_forward_hook(hook)

    for number, layer in enumerate(model.model.layers):
        keep(f"attention{number}", layer.self_attn)
        keep(f"mlp{number}", layer.mlp)
        keep(f"stream{number}", layer, whole=True)
    keep("norm", model.model.norm)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--cache-gib", type=float, required=True)
    parser.add_argument("--capture", action="store_true")
    parser.add_argument("--eager", action="store_true")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints must not come between
    started = time.monotonic()
    server = Server(parser.parse_args())
    import vllm

    print(json.dumps({"vllm": vllm.__version__, "start_seconds": round(time.monotonic() - started, 1)}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("what"))(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
