"""Measured figures beside their bounds, all of them printed, before a test that holds several at once fails."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import torch
from torch import Tensor

__all__ = ["Figures"]

_SHOWN = 3
"""Largest of many figures that are printed when all hold."""


class Figures:
    """A context in which figures are compared with their bounds; what does not hold is raised together at its end."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def __enter__(self) -> Figures:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        if kind is None:
            assert not self.wrong, f"{len(self.wrong)} out of bounds: " + "; ".join(self.wrong)

    def below(self, what: str, value: float | Tensor, bound: float | Tensor) -> None:
        """The value must be below its bound; one that is not a number is not."""
        self._hold(what, float(value), float(bound), float(value) < float(bound), "<")

    def above(self, what: str, value: float | Tensor, bound: float | Tensor) -> None:
        """The value must be above its bound."""
        self._hold(what, float(value), float(bound), float(value) > float(bound), ">")

    def all_below(self, what: str, values: Mapping[str, float], bounds: Mapping[str, float] | float) -> None:
        """Every value must be below its bound: prints those that are not, and the nearest to it of the others."""
        limits = bounds if isinstance(bounds, Mapping) else dict.fromkeys(values, bounds)
        held = {name: values[name] < limits[name] for name in values}
        order = sorted(values, key=lambda name: -values[name] / limits[name] if values[name] == values[name] else -1e9)
        for place, name in enumerate(order):
            if place < _SHOWN or not held[name]:
                self._hold(f"{what} {name}", values[name], limits[name], held[name], "<")

    def equal(self, what: str, value: object, wanted: object) -> None:
        """The two must be the same."""
        right = torch.equal(value, wanted) if isinstance(value, Tensor) else value == wanted
        print(f"{what}: {'the same' if right else 'NOT the same'}")
        if not right:
            self.wrong.append(what)

    def _hold(self, what: str, value: float, bound: float, held: bool, sign: str) -> None:
        text = f"{what}: {value:.4g} {sign} {bound:.4g}"
        print(text if held else f"{text}  OUT OF BOUNDS")
        if not held:
            self.wrong.append(text)
