"""`vime-trainer plan`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from vime_proto.settings import Settings, load
from vime_trainer.settings.parallel import ParallelConfig

__all__ = ["PlanSettings", "main"]


class PlanSettings(Settings):
    """`vime-trainer plan CONFIG --gpus N`: CONFIG is the TOML file of an rl or sft run, a config.json, or its folder."""

    model: Path = Field(description="config.json or the folder that holds it; CONFIG sets it")
    gpus: int = Field(1, ge=1, description="trainer processes, one a GPU")
    tokens_per_micro_batch: int = Field(16384, ge=1, description="tokens of a micro-batch")
    tokens_per_step: int | None = Field(
        None, ge=1, description="tokens of an optimizer step; default: one micro-batch for each data-parallel rank"
    )
    sequence_length: int | None = Field(None, ge=1, description="mean tokens of a sequence; default: a micro-batch's")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="of weights and activations")
    recompute: bool = Field(False, description="keep only the inputs of layers for the backward pass")
    distributed: bool = Field(False, description="data-parallel ranks share the optimizer's state")
    cpu_offload: bool = Field(False, description="the optimizer's state is in host memory")
    reference: bool = Field(False, description="a reference policy for the KL is kept as well")
    critic: bool = Field(False, description="a critic is trained beside the policy")
    critic_model: Path | None = Field(None, description="config.json or folder of the critic; absent takes the model's")
    critic_distributed: bool = Field(False, description="as distributed, of the critic's optimizer")
    critic_cpu_offload: bool = Field(False, description="as cpu_offload, of the critic's optimizer")
    critic_epochs: int = Field(1, ge=1, description="the critic's passes over a batch")
    gpu_gib: float | None = Field(None, gt=0, description="memory of a GPU in GiB, to say whether it fits")
    format: Literal["table", "json"] = Field("table", description="what is printed; --json is short for json")
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="after")
    def _check(self) -> PlanSettings:
        for prefix in ("", "critic_"):
            if getattr(self, f"{prefix}cpu_offload") and not getattr(self, f"{prefix}distributed"):
                raise ValueError(
                    f"{prefix}cpu_offload: runs have it for the distributed optimizer alone; set {prefix}distributed"
                )
        return self


def main(argv: Sequence[str], prog: str) -> int:
    """Prints the plan.

    Raises:
        OSError, ValueError: a file that cannot be read, or a layout that does not divide.
    """
    words = list(argv)
    base: dict[str, Any] = {}
    if words and not words[0].startswith("-"):
        base = _of_run(Path(words.pop(0)))
    words = ["--format=json" if word == "--json" else word for word in words]
    settings = load(PlanSettings, [*_options(base), *words], prog)
    from vime_trainer.models import read_config
    from vime_trainer.plan import CriticWorkload, Workload, make_plan, render

    workload = Workload(
        micro_batch_tokens=settings.tokens_per_micro_batch,
        step_tokens=settings.tokens_per_step,
        sequence_length=settings.sequence_length,
        dtype=settings.dtype,
        recompute=settings.recompute,
        distributed=settings.distributed,
        cpu_offload=settings.cpu_offload,
    )
    critic = None
    if settings.critic:
        critic = CriticWorkload(
            config=None if settings.critic_model is None else read_config(settings.critic_model),
            distributed=settings.critic_distributed,
            cpu_offload=settings.critic_cpu_offload,
            epochs=settings.critic_epochs,
        )
    config = read_config(settings.model)
    plan = make_plan(config, settings.parallel, settings.gpus, workload, reference=settings.reference, critic=critic)
    print(json.dumps(plan.to_dict(), indent=2) if settings.format == "json" else render(plan, settings.gpu_gib))
    return 0


def _of_run(path: Path) -> dict[str, Any]:
    """What a run's TOML file says of the keys here; anything else is the model itself."""
    if path.suffix != ".toml":
        return {"model": str(path)}
    try:
        run = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from error
    if "model" not in run:
        raise ValueError(f"{path}: no key 'model'; valid: the configuration of vime-trainer rl or sft")
    optimizer = run.get("optimizer", {})
    found = {
        "model": run["model"],
        # The runs' own defaults, which are not this command's.
        "dtype": run.get("dtype", "float32"),
        "recompute": run.get("recompute", False),
        "distributed": optimizer.get("distributed", False),
        "cpu_offload": optimizer.get("cpu_offload", False),
        "tokens_per_micro_batch": run.get("micro_batch_tokens", run.get("batch", {}).get("token_budget", 16384)),
        "parallel": run.get("parallel", {}),
    }
    if "batch_tokens" in run:
        found["tokens_per_step"] = run["batch_tokens"]
    return found | _other_models(run)


def _other_models(run: dict[str, Any]) -> dict[str, Any]:
    """What an rl run keeps beside the policy."""
    from vime_trainer.algorithms import AlgorithmSettings, algorithm_of

    settings = AlgorithmSettings(**run.get("algorithm", {}))
    found: dict[str, Any] = {"reference": settings.kl.coefficient > 0}
    if algorithm_of(settings).needs_critic:
        critic = run.get("critic", {})
        optimizer = critic.get("optimizer", {})
        found |= {
            "critic": True,
            "critic_distributed": optimizer.get("distributed", False),
            "critic_cpu_offload": optimizer.get("cpu_offload", False),
            "critic_epochs": critic.get("epochs", 1),
        }
        if "model" in critic:
            found["critic_model"] = critic["model"]
    return found


def _options(values: dict[str, Any], prefix: str = "--") -> list[str]:
    words: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict):
            words += _options(value, f"{prefix}{key}.")
        else:
            words.append(f"{prefix}{key}={value if isinstance(value, str) else json.dumps(value)}")
    return words
