"""How far a trainer's log-probs are from an engine's when routes are replayed, where that comes from, what capture costs.

``python study.py --work DIR [--std 0.02] [--parts moe,dense,throughput,layers] [--tiny]`` writes random models into DIR,
generates with vLLM, scores with vime-trainer, and prints JSON lines; nonzero status when a part failed. It needs no
package itself: ``--engine-python`` has vllm, ``--trainer-python`` has vime-trainer and vime-r3; one may have both.
``--reuse`` leaves models and generated files in DIR as they are and runs the trainer alone.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from engine_process import EngineProcess
from report import attempt, failures, say
from shapes import MODELS, Size, size

_HERE = Path(__file__).parent
_PARTS = (*MODELS, "throughput", "layers")
_ROUNDS = 3


def start_engines(engines: dict[str, EngineProcess], options: argparse.Namespace, of: Size) -> None:
    """Fills `engines` with all that the parts need, started at once; those that do not start are left out."""
    work, parts = options.work, options.parts

    def start(name: str, model: str, *flags: str, cache_gib: float = of.cache_gib) -> None:
        engines[name] = EngineProcess(options.engine_python, name, work, work / model, cache_gib, *flags)

    for model in MODELS:
        if model in parts:
            capture = ["--capture"] if model == "moe" else []
            start(model, model, *capture)
            if "layers" in parts:
                start(f"{model}-eager", model, *capture, "--eager", cache_gib=min(of.cache_gib, 1.0))
    if "throughput" in parts and "moe" in parts:
        start("moe-off", "moe")
    for name in list(engines):
        ready = False
        with attempt(f"start {name}"):
            say(engine=name, **engines[name].ready())
            ready = True
        if not ready:
            engines.pop(name).stop()
    return engines


def generate(engines: dict[str, EngineProcess], work: Path, of: Size) -> None:
    """Writes NAME-generated.npz, NAME-scored.npz and NAME-layers.npz."""
    prompts, warm = str(work / "prompts.npz"), str(work / "warm.npz")
    for name in ("moe", "moe-off", "dense"):
        if name in engines:
            with attempt(f"warm up {name}"):
                engines[name].ask("generate", data=warm, new=min(of.new_tokens, 32))
    for name in MODELS:
        generated = str(work / f"{name}-generated.npz")
        if name in engines:
            with attempt(f"generate {name}"):
                say(engine=name, **engines[name].ask("generate", data=prompts, new=of.new_tokens, save=generated))
                engines[name].ask("score", data=generated, count=of.scored, save=str(work / f"{name}-scored.npz"))
        if f"{name}-eager" in engines:
            with attempt(f"layers {name}"):
                answer = engines[f"{name}-eager"].ask("layers", data=generated, save=str(work / f"{name}-layers.npz"))
                say(engine=f"{name}-eager", **answer)


def throughput(engines: dict[str, EngineProcess], work: Path, of: Size) -> None:
    """Generation with capture on and off, the other order every round."""
    speeds: dict[str, list[float]] = {"moe": [], "moe-off": []}
    for number in range(_ROUNDS):
        for name in list(speeds)[:: -1 if number % 2 else 1]:
            answer = engines[name].ask("generate", data=str(work / "prompts.npz"), new=of.new_tokens)
            speeds[name].append(answer["tokens_per_second"])
    on, off = (statistics.median(values) for values in speeds.values())
    say(throughput={"on": speeds["moe"], "off": speeds["moe-off"]}, on=on, off=off, capture_cost=round(1 - on / off, 4))


def run_script(options: argparse.Namespace, name: str, *arguments: str) -> None:
    """One of the scripts beside this one, by the trainer's interpreter; its lines come out as they are."""
    command = [options.trainer_python, str(_HERE / name), "--work", str(options.work), *arguments]
    subprocess.run([*command, *(["--tiny"] if options.tiny else [])], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, generated files and logs (5 GB)")
    parser.add_argument("--std", type=float, help="standard deviation of the random weights; 0.02 unless --tiny")
    parser.add_argument("--parts", default=",".join(_PARTS), type=lambda text: text.split(","), help="some of these")
    parser.add_argument("--tiny", action="store_true", help="shows that everything runs; figures mean nothing")
    parser.add_argument("--reuse", action="store_true", help="no engine: the files of an earlier run")
    parser.add_argument("--engine-python", default=sys.executable)
    parser.add_argument("--trainer-python", default=sys.executable)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(_PARTS):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}; valid: {', '.join(_PARTS)}")
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    of = size(options.tiny)
    if not options.reuse:
        for old in options.work.glob("*.npz"):
            old.unlink()  # a part that fails must not be scored by an older run's files
        run_script(options, "models.py", *([] if options.std is None else ["--std", str(options.std)]))
        engines: dict[str, EngineProcess] = {}
        try:
            start_engines(engines, options, of)
            generate(engines, options.work, of)
            if {"moe", "moe-off"} <= engines.keys():
                with attempt("throughput"):
                    throughput(engines, options.work, of)
        finally:
            for engine in engines.values():
                engine.stop()
    with attempt("trainer"):
        run_script(options, "trainer.py", "--parts", ",".join(options.parts))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
