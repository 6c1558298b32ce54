"""The table [algorithm] of the configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from vime_proto.errors import nearest
from vime_proto.settings import Section

from ._aggregation import AGGREGATIONS
from ._corrections import CORRECTIONS
from ._kl import ESTIMATORS
from ._registry import ALGORITHMS, algorithm_of, get_algorithm


class KlSettings(Section):
    """KL to the reference policy, which is the model that the run started from."""

    coefficient: float = Field(0.0, ge=0, description="0 turns it off, and no reference is loaded")
    estimator: str = Field("k3", description="k1, k2, k3; k1+ and k3+ have their value and the gradient of k2")
    place: Literal["loss", "reward"] = Field("loss", description="term of the loss, or penalty within the reward")
    refresh_interval: int | None = Field(
        None,
        ge=1,
        description="batches after which the reference becomes the policy as it is then; absent keeps the first",
    )

    @field_validator("estimator")
    @classmethod
    def _known(cls, value: str) -> str:
        return _one_of(value, ESTIMATORS, "KL estimator")

    @model_validator(mode="after")
    def _has_a_gradient(self) -> KlSettings:
        if self.coefficient > 0 and self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                'estimator: the gradient of "k1" is zero in expectation, so as a loss it does nothing; use "k1+", "k2" or '
                '"k3", or place = "reward"'
            )
        return self


class AlgorithmSettings(Section):
    """What is optimised. Keys that an algorithm does not read are harmless to it."""

    name: str = Field("grpo", description=f"{', '.join(ALGORITHMS)}, or module:attribute")
    advantage: str | None = Field(None, description="module:function in place of the algorithm's own advantage")
    loss: str | None = Field(None, description="module:function in place of the algorithm's own loss")
    clip_low: float = Field(
        0.2, ge=0, description="the ratio is clipped to [1 - clip_low, 1 + clip_high]; dppo: bound on probabilities"
    )
    clip_high: float = Field(0.28, ge=0, description="see clip_low")
    clip_dual: float | None = Field(None, gt=1, description="dual clip for negative advantages; off when absent")
    aggregation: str | None = Field(None, description="token, sequence or constant; absent takes the algorithm's own")
    constant_length: int | None = Field(None, ge=1, description='divisor of aggregation "constant", in tokens')
    old_policy: Literal["trainer", "engine", "linear"] = Field(
        "trainer",
        description="what the ratio is relative to: log-probs of the trainer before the batch's first update, those of the "
        "engine, or those on the line between engine and live policy, by versions",
    )
    correction: str = Field("tis", description=", ".join(CORRECTIONS))
    correction_low: float | None = Field(None, description="lower bound of icepop and geometric")
    correction_high: float | None = Field(None, description="upper bound; 2 for tis")
    correction_normalise: bool = Field(False, description="divide the correction's weights by their mean over the step")
    sequence_mask: float | None = Field(
        None,
        ge=0,
        description="drop negative advantages of sequences whose mean log(engine / policy) exceeds this; off when absent",
    )
    uncorrected: bool = Field(False, description="allows stale samples without any correction")
    entropy_coefficient: float = Field(0.0, ge=0, description="entropy bonus")
    kl: KlSettings = KlSettings()
    gamma: float = Field(1.0, ge=0, le=1, description="ppo: discount of a token")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="ppo: lambda of generalised advantage estimation")
    bootstrap_truncated: bool = Field(
        False,
        description="ppo: a rollout that a limit cut goes on being worth what the critic says of its last state; otherwise the "
        "limit is its end, after which nothing is earned",
    )
    normalise_advantages: bool = Field(False, description="ppo: mean 0 and deviation 1 over the batch's tokens")
    value_clip: float | None = Field(
        0.2, gt=0, description="ppo: values of the critic move at most this far from those before; absent does not clip"
    )
    overlong_limit: int | None = Field(None, ge=1, description="dapo: longest response, in tokens; off when absent")
    overlong_margin: int = Field(4096, ge=1, description="dapo: tokens below the limit where the penalty starts")
    options: dict[str, Any] = Field(default_factory=dict, description="free keys for an algorithm of your own")

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        algorithm = get_algorithm(str(values.get("name", "grpo")))
        base = {"aggregation": algorithm.aggregation, **algorithm.defaults}
        if values.get("old_policy") == "engine":
            base["correction"] = "none"
        merged = {**base, **values}
        for key, default in base.items():
            if isinstance(default, dict) and isinstance(values.get(key), dict):
                merged[key] = {**default, **values[key]}
        return merged

    @field_validator("correction")
    @classmethod
    def _known_correction(cls, value: str) -> str:
        return _one_of(value, CORRECTIONS, "correction")

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmSettings:
        if self.aggregation is not None:
            _one_of(self.aggregation, AGGREGATIONS, "aggregation")
        if self.aggregation == "constant" and self.constant_length is None:
            raise ValueError('constant_length: needed by aggregation "constant"; the longest response, in tokens')
        if self.correction_normalise and (self.old_policy != "trainer" or self.correction == "none"):
            raise ValueError(
                'correction_normalise: needs old_policy = "trainer" and a correction, whose weights are known before the '
                "batch is cut"
            )
        low, high = (
            default if given is None else given
            for given, default in zip(
                (self.correction_low, self.correction_high), CORRECTIONS[self.correction][1:], strict=True
            )
        )
        if not (0 <= low <= high and high > 0):
            raise ValueError(
                f"correction_low, correction_high: {low} and {high} for {self.correction} leave no weight; valid: "
                "0 <= low <= high, high above 0"
            )
        algorithm = algorithm_of(self)
        if self.kl.coefficient > 0 and self.kl.place == "reward" and not algorithm.kl_in_reward:
            raise ValueError(f'kl.place: a KL within the reward has no meaning for {self.name}; use place = "loss"')
        if self.overlong_limit is not None and self.overlong_margin >= self.overlong_limit:
            raise ValueError("overlong_margin: must be below overlong_limit")
        return self


def _one_of(value: str, valid, what: str) -> str:
    if value not in valid:
        raise ValueError(nearest(value, valid, what))
    return value
