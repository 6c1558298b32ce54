"""The trainer's half of the study: `python trainer.py --work DIR --parts moe,dense,layers`, by the trainer's interpreter."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from layers import compare_layers
from report import attempt, failures, say
from rollouts import Rollouts, difference, score
from shapes import MODELS, size
from timing import time_passes
from variants import ENGINE_ORDER, VARIANTS

from vime_trainer.policy import Policy


class Study:
    """One model against what the engine generated with it; `means` collects mean differences by variant."""

    def __init__(self, name: str, work: Path, scored: int) -> None:
        self.name, self.folder, self.replay = name, work / name, name == "moe"
        self.scored_file, self.count = work / f"{name}-scored.npz", scored
        self.all = Rollouts.load(work / f"{name}-generated.npz")
        self.some = self.all.first(scored)
        self.found: dict[str, np.ndarray] = {}

    def run(self) -> float:
        """All comparisons; the mean difference by default."""
        with attempt(f"{self.name}: engine"):
            self.engine()
        policy = Policy.from_hf(self.folder, dtype="bfloat16", replay=self.replay)
        self.default(policy)
        if self.replay:
            with attempt(f"{self.name}: timing"):
                say(study=self.name, **time_passes(policy, self.some))
        for variant in VARIANTS:
            if variant != "default" and (self.replay or not VARIANTS[variant].moe):
                with attempt(f"{self.name}: {variant}"):
                    self.variant(variant, policy)
        del policy
        _free()
        with attempt(f"{self.name}: float32"):
            self.float32()
        return difference(self.found["default"], self.some.logprobs)["mean"]

    def engine(self) -> None:
        """The engine's own decode against its prefill."""
        data = np.load(self.scored_file)
        new = self.some.logprobs.shape[1]
        values = difference(data["logprobs"][:, -new:], self.some.logprobs)
        if self.some.routes is not None:
            one, other = (np.sort(routes, -1)[:, -new:] for routes in (data["routes"], self.some.routes))
            values["flips"] = round(float((one != other).any(-1).mean()), 4)
        self.say("engine: prefill against decode", values)

    def default(self, policy: Policy) -> None:
        """The trainer as it is: twice, on all sequences, without replay, and with wrong routes."""
        self.found["default"], _ = score(policy, self.some, self.replay)
        self.say("default", difference(self.found["default"], self.some.logprobs))
        again, _ = score(policy, self.some, self.replay)
        self.say("default against itself", difference(again, self.found["default"]))
        found, flips = score(policy, self.all, self.replay, measure=self.replay)
        self.say("default, all sequences", difference(found, self.all.logprobs), flips=flips)
        if self.replay:
            found, _ = score(policy, self.all, False)
            self.say("no replay, all sequences", difference(found, self.all.logprobs))
            found, _ = score(policy, self.some.late(), True)
            self.say("routes one row late", difference(found, self.some.logprobs))

    def variant(self, name: str, policy: Policy) -> None:
        """One other way to round."""
        variant = VARIANTS[name]
        if variant.builds:
            with variant.use(None):
                policy = Policy.from_hf(self.folder, dtype="bfloat16", replay=self.replay)
                self.found[name], _ = score(policy, self.some, self.replay)
        else:
            (model,) = policy.chunks
            with variant.use(model):
                self.found[name], _ = score(policy, self.some, self.replay)
        self.say(name, difference(self.found[name], self.some.logprobs))

    def float32(self) -> None:
        """The same weights in float32: what is left against the engine is the engine's own rounding."""
        policy = Policy.from_hf(self.folder, dtype="float32", replay=self.replay)
        found, _ = score(policy, self.some, self.replay, tokens=8192)
        self.say("float32", difference(found, self.some.logprobs))
        for name in ("default", ENGINE_ORDER):
            self.say(f"{name}, against float32", difference(self.found[name], found))

    def say(self, variant: str, values: dict[str, float], **more: object) -> None:
        say(study=self.name, variant=variant, **values, **more)


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--parts", required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    parts, means = options.parts.split(","), {}
    for name in MODELS:
        if name in parts:
            with attempt(name):
                means[name] = Study(name, options.work, size(options.tiny).scored).run()
            _free()
    if len(means) == len(MODELS):
        say(replay=means["moe"], dense=means["dense"], ratio=round(means["moe"] / means["dense"], 3))
    for name in MODELS:
        engine = options.work / f"{name}-layers.npz"
        if name in parts and "layers" in parts and engine.exists():
            with attempt(f"{name}: layers"):
                for line in compare_layers(options.work / name, options.work / f"{name}-generated.npz", engine):
                    say(layers=name, **line)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
