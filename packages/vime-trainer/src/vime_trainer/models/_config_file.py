"""Reading a Hugging Face config.json of transformers 4 or 5."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["HfConfig", "read_config"]

_MISSING = object()


class HfConfig:
    """A config.json whose keys may have changed their names between versions.

    Args:
        values: the parsed file.
        source: where it came from, for errors.
    """

    def __init__(self, values: Mapping[str, Any], source: str = "config.json") -> None:
        self.values = dict(values)
        self.source = source

    def get(self, *names: str, default: Any = _MISSING) -> Any:
        """The value under the first of `names` that is present and not null.

        Raises:
            ValueError: none is, and there is no default.
        """
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        if default is _MISSING:
            raise ValueError(f"{self.source}: no key {' or '.join(repr(name) for name in names)}")
        return default

    def rope_theta(self) -> float:
        """Base of the rotary frequencies; `rope_parameters` in transformers 5, `rope_theta` and `rope_scaling` before.

        Raises:
            ValueError: a scaled rotary embedding, which the families here do not have.
        """
        rope = self.get("rope_parameters", "rope_scaling", default={})
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{self.source}: rope_type {kind!r} is not supported; valid: 'default'")
        theta = rope.get("rope_theta")
        return float(theta if theta is not None else self.get("rope_theta", default=10000.0))

    def rotary_fraction(self, default: float) -> float:
        """Part of each head that rotary positions turn; in `rope_parameters` in transformers 5, beside it before.

        Raises:
            ValueError: not above 0 and at most 1.
        """
        rope = self.get("rope_parameters", "rope_scaling", default={})
        fraction = float(rope.get("partial_rotary_factor", self.get("partial_rotary_factor", default=default)))
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"{self.source}: partial_rotary_factor {fraction}; valid: above 0, at most 1")
        return fraction

    def demand_rotary_fraction(self, valid: float) -> None:
        """Refuses another part than the family's.

        Raises:
            ValueError: names it.
        """
        if (fraction := self.rotary_fraction(default=valid)) != valid:
            raise ValueError(f"{self.source}: partial_rotary_factor {fraction} is not supported; valid: {valid}")

    def demand(self, name: str, *valid: Any) -> None:
        """Refuses a value that would change the computation; an absent key is fine.

        Raises:
            ValueError: the value is none of `valid`.
        """
        value = self.get(name, default=valid[0])
        if value not in valid:
            shown = ", ".join(repr(entry) for entry in valid)
            raise ValueError(f"{self.source}: {name} {value!r} is not supported; valid: {shown}")


def read_config(path: str | Path) -> HfConfig:
    """Reads config.json, given the file or the folder that holds it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a JSON object.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no config.json at {path}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file}: not a JSON object")
    return HfConfig(values, str(file))
