"""Reads one number from an answer, exactly."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from vime_rollout.rewards._extract import plain

_LONGEST = 200
_LARGEST_EXPONENT = 400
_NUMBER = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,|[ \u00a0\u202f])\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+"
_SCIENTIFIC = (
    r"(?:\s*(?:[eE]|\\times\s*10\s*\^|\\cdot\s*10\s*\^|[*x\u00d7]\s*10\s*(?:\^|\*\*))\s*\{?\s*([+-]?\d+)\s*\}?)?"
)
_SIGN = r"([+\-\u2212]?)\s*"
_FRACTION = re.compile(rf"{_SIGN}(\d+\s*)?\\[dtc]?frac\s*(?:\{{\s*(-?\d+)\s*\}}|(\d))\s*(?:\{{\s*(-?\d+)\s*\}}|(\d))")
_RATIO = re.compile(rf"{_SIGN}({_NUMBER})\s*/\s*({_NUMBER})(?![\d/])")
_PLAIN = re.compile(rf"{_SIGN}({_NUMBER}){_SCIENTIFIC}")


class Number(NamedTuple):
    """A number, and whether a percent sign follows it."""

    value: Fraction
    percent: bool


def read_number(text: str, *, lone: bool = True) -> Number | None:
    r"""The number in ``text``; None when there is none, or when there are several and ``lone`` is set.

    Understands signs, thousands separators (``1,234``, ``1{,}234``, ``1 234``), decimals, scientific notation, ``a/b``,
    ``\frac``, ``\dfrac``, ``\tfrac``, mixed fractions, percent, and a unit or a name before or after (``x = 5\text{ cm}``).
    Nothing is evaluated: an expression such as ``2+3`` or ``5^5`` is no number.
    """
    text = plain(text[-4 * _LONGEST :] if not lone else text)
    if len(text) > _LONGEST and lone:
        return None
    numbers = list(_all(text))
    if not numbers or (lone and len(numbers) > 1):
        return None
    value, end, start = numbers[-1]
    before, after = text[:start].rstrip(), text[end:].lstrip()
    if before.endswith(("^", "*", "/", "+", "_")) or after.startswith(("^", "*", "/", "+", "!")):
        return None
    return Number(value, after.startswith(("%", "\\%")) or after.lower().startswith("percent"))


def _all(text: str):
    position = 0
    while position < len(text):
        best = None
        for pattern, convert in ((_FRACTION, _fraction), (_RATIO, _ratio), (_PLAIN, _decimal)):
            match = pattern.search(text, position)
            if match and (best is None or match.start() < best[0].start()):
                best = match, convert
        if best is None:
            return
        match, convert = best
        # The 2 of cm^2 and the 1 of x_1 belong to a unit or a name.
        attached = text[: match.start()].rstrip(" {")[-1:] in ("^", "_") and match.start() > 0
        position = match.end()
        if attached and re.search(r"[A-Za-z}]\s*[\^_]\s*\{?$", text[: match.start()]):
            continue
        value = convert(match)
        if value is not None:
            yield value, match.end(), match.start()


def _sign(text: str) -> int:
    return -1 if text in ("-", "\u2212") else 1


def _fraction(match: re.Match) -> Fraction | None:
    sign, whole, above, above_digit, below, below_digit = match.groups()
    denominator = int(below or below_digit)
    if denominator == 0:
        return None
    return _sign(sign) * (int(whole or 0) + Fraction(int(above or above_digit), denominator))


def _digits(text: str) -> Fraction:
    return Fraction(re.sub(r"[^\d.]", "", text))


def _ratio(match: re.Match) -> Fraction | None:
    sign, above, below = match.groups()
    denominator = _digits(below)
    return _sign(sign) * _digits(above) / denominator if denominator else None


def _decimal(match: re.Match) -> Fraction | None:
    sign, digits, exponent = match.groups()
    power = int(exponent or 0)
    if abs(power) > _LARGEST_EXPONENT:
        return None
    return _sign(sign) * _digits(digits) * Fraction(10) ** power
