"""Peak memory and time of log-probabilities in chunks, side by side with whole logits, forward and backward.

    python benchmarks/bench_logprobs.py [--rows N] [--vocab V] [--hidden H] [--skip-whole]

The GPU's default is 32,768 rows of a 151,936-token vocabulary, the CPU's 1,024 rows. Peaks are above what was allocated before: on
a GPU by its allocator, on the CPU by the bytes that torch's operators allocate and have not freed.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vime_trainer.policy._logprobs import token_logprobs


class LiveBytes(TorchDispatchMode):
    """Follows storages that operators return, from their making to their end."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        import weakref

        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)

        def gone() -> None:
            self._known.discard(key)
            self.live -= size

        weakref.finalize(storage, gone)


def chunked(hidden: Tensor, head: Tensor, targets: Tensor, heat: Tensor) -> Tensor:
    """This trainer's."""
    return token_logprobs(hidden, head, targets, heat)[0]


def whole(hidden: Tensor, head: Tensor, targets: Tensor, heat: Tensor) -> Tensor:
    """The usual two lines."""
    logits = (hidden @ head.t()).float() / heat[:, None]
    return logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def measure(
    run: Callable[..., Tensor], inputs: tuple[Tensor, ...], repeats: int = 3
) -> tuple[Tensor, dict[str, float]]:
    """Values, and the peak and the best time of forward and backward."""
    cuda = inputs[0].is_cuda
    seconds, peak, values = [], 0, torch.empty(0)
    for _ in range(repeats if cuda else 1):
        for tensor in inputs[:2]:
            tensor.grad = None
        gc.collect()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            begin = time.perf_counter()
            values = run(*inputs)
            values.sum().backward()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        else:
            watch = LiveBytes()
            begin = time.perf_counter()
            with watch:
                values = run(*inputs)
                values.sum().backward()
            peak = watch.peak
        seconds.append(time.perf_counter() - begin)
    return values.detach(), {"peak_mib": round(peak / (1 << 20), 1), "seconds": round(min(seconds), 4)}


def bench(rows: int, vocab: int, hidden: int, device: str, dtype: torch.dtype, with_whole: bool = True) -> dict:
    """Both ways on the same random inputs."""
    make = torch.Generator(device).manual_seed(0)
    states = torch.randn(rows, hidden, generator=make, device=device).to(dtype).requires_grad_()
    head = (0.02 * torch.randn(vocab, hidden, generator=make, device=device)).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=make, device=device)
    inputs = (states, head, targets, torch.ones(rows, device=device))
    values, found = measure(chunked, inputs)
    grads = [tensor.grad.detach().float() for tensor in inputs[:2]]
    result = {
        "rows": rows,
        "vocab": vocab,
        "hidden": hidden,
        "dtype": str(dtype).removeprefix("torch."),
        "whole_logits_mib": round(rows * vocab * 4 / (1 << 20), 1),
        "chunked": found,
    }
    if with_whole:
        try:
            plain, result["whole"] = measure(whole, inputs)
            result["largest_difference"] = float((values - plain).abs().max())
            pairs = zip(grads, inputs[:2], strict=True)
            # Relative to the size of the gradient: of the hidden states, of the head.
            result["gradient_difference"] = [float((one - two.grad).norm() / two.grad.norm()) for one, two in pairs]
        except torch.OutOfMemoryError:
            result["whole"] = "out of memory"
    return result


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=32768 if cuda else 1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=2560 if cuda else 64)
    parser.add_argument("--skip-whole", action="store_true")
    args = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    print(json.dumps(bench(args.rows, args.vocab, args.hidden, device, dtype, not args.skip_whole)))


if __name__ == "__main__":
    main()
