"""Rewards by name, and by import path; options checked against the function's signature."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from vime_proto.errors import ContractError, nearest
from vime_rollout.rewards._builtin import exact, numeric
from vime_rollout.rewards._math import math
from vime_rollout.rewards._types import RewardFunction, RewardInput, Score, check_score

BUILTIN: dict[str, RewardFunction] = {"exact": exact, "numeric": numeric, "math": math}
# Bounded in time by construction, hence safe outside the pool.
INLINE = frozenset({"exact", "numeric"})


@dataclasses.dataclass(frozen=True)
class RewardSpec:
    """A configured reward.

    Attributes:
        name: how prompts refer to it.
        function: a built-in name, or ``module:function``.
        options: keyword arguments of every call.
        timeout_seconds: run time allowed; None takes the pool's.
    """

    name: str
    function: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    timeout_seconds: float | None = None

    @property
    def inline(self) -> bool:
        """Whether it may run without a process of its own."""
        return self.function in INLINE


def import_path(path: str, field: str) -> Any:
    """The object at ``module:attribute``.

    Raises:
        ContractError: no such module or attribute; names the nearest one.
    """
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise ContractError(field, f"{path!r} is not of the form module:attribute")
    try:
        target = importlib.import_module(module_name)
    except ImportError as error:
        raise ContractError(field, f"cannot import {module_name!r}: {error}") from error
    for part in attribute.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            names = [name for name in dir(target) if not name.startswith("_")]
            raise ContractError(field, nearest(part, names, f"attribute of {module_name}")) from None
    return target


def read_specs(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, RewardSpec]:
    """Rewards of a configuration: the built-in ones, and the tables ``[rewards.NAME]``.

    A table may hold ``function`` (a built-in name or ``module:function``; default: NAME), ``timeout_seconds``, and options
    of the function.

    Raises:
        ContractError: an unknown built-in name or option, with the nearest valid one.
    """
    specs = {name: RewardSpec(name, name) for name in BUILTIN}
    for name, table in tables.items():
        options = dict(table)
        function, timeout = options.pop("function", name), options.pop("timeout_seconds", None)
        field = f"rewards.{name}"
        if not isinstance(function, str) or (":" not in function and function not in BUILTIN):
            raise ContractError(f"{field}.function", nearest(str(function), BUILTIN, "reward") + ", or module:function")
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise ContractError(f"{field}.timeout_seconds", f"must be above 0, got {timeout!r}")
        if function in BUILTIN:
            _check_options(BUILTIN[function], options, field)
        specs[name] = RewardSpec(name, function, options, timeout)
    return specs


def find_spec(specs: Mapping[str, RewardSpec], name: str, field: str = "reward") -> RewardSpec:
    """The reward of this name; a ``module:function`` needs no table.

    Raises:
        ContractError: unknown; names the nearest valid one.
    """
    if name in specs:
        return specs[name]
    if ":" in name:
        return RewardSpec(name, name)
    raise ContractError(field, nearest(name, specs, "reward"))


def resolve(spec: RewardSpec) -> RewardFunction:
    """The function of a reward, imported, its options checked.

    Raises:
        ContractError: it cannot be imported, is no function, or has no such option.
    """
    field = f"rewards.{spec.name}"
    function = BUILTIN.get(spec.function) or import_path(spec.function, f"{field}.function")
    if not callable(function):
        raise ContractError(f"{field}.function", f"{spec.function!r} is not callable")
    _check_options(function, spec.options, field)
    return function


def apply(function: RewardFunction, spec: RewardSpec, item: RewardInput) -> Score:
    """Runs a reward here and now.

    Raises:
        RewardError: an answer that is no finite number.
        Exception: whatever the function raises.
    """
    return check_score(function(item, **spec.options), spec.name)


def _check_options(function: RewardFunction, options: Mapping[str, Any], field: str) -> None:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    names = [one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    for key in options:
        if key not in names:
            raise ContractError(f"{field}.{key}", nearest(key, ["function", "timeout_seconds", *names], "option"))
