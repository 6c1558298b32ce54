"""Mathematical equivalence through math-verify."""

from __future__ import annotations

import functools
import logging
import re

from vime_rollout.rewards._builtin import reference
from vime_rollout.rewards._extract import after_thinking, final_answer, last_box
from vime_rollout.rewards._types import RewardError, RewardInput

_LONGEST = 2000
_TOWER = re.compile(r"(?:\^|\*\*)\s*[{(]?\s*[\w.]+\s*(?:\^|\*\*)")
_SPELLING = (
    (re.compile(r"\\(?:fbox|boxed)(?![a-zA-Z])"), r"\\boxed"),
    (re.compile(r"\\(?:[dtc]frac|df|tf)(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"(\d)\{,\}(\d{3})"), r"\1,\2"),
)


def math(
    item: RewardInput,
    *,
    float_rounding: int = 6,
    numeric_precision: int = 15,
    strict: bool = True,
    thinking_start: str = "<think>",
    thinking_end: str = "</think>",
) -> float:
    r"""1.0 when the answer of the response is mathematically equal to the reference, after math-verify.

    The answer is the last ``\boxed{}``, else what follows "Answer:", else the whole response. It sets no alarms, so that it
    works in any thread; the time limit is that of the process it runs in. Towers of powers are compared as text only.

    Args:
        float_rounding, numeric_precision, strict: as in ``math_verify.verify``.
        thinking_start, thinking_end: tags around reasoning, which never counts; a response that ends inside it gets 0.

    Raises:
        RewardError: the reference is missing or cannot be read.
    """
    gold_text = reference(item)
    gold_answer = last_box(gold_text) or gold_text
    text = after_thinking(item.response, item.prompt_text, thinking_start, thinking_end)
    if text is None:
        return 0.0
    answer = final_answer(text)
    if not answer or not gold_answer.strip():
        return float(answer == gold_answer.strip() and last_box(text) is not None)
    if _squeeze(answer) == _squeeze(gold_answer):
        return 1.0
    if len(answer) > _LONGEST or _TOWER.search(answer):
        return 0.0
    gold, found = _parse(gold_answer), _parse(answer)
    if not gold:
        raise RewardError(f"the answer {item.answer!r} of prompt {item.prompt_id!r} cannot be read as mathematics")
    if not found or _is_empty(found) != _is_empty(gold):
        return 0.0
    _, verify = _library()
    return float(
        verify(
            list(gold),
            list(found),
            float_rounding=float_rounding,
            numeric_precision=numeric_precision,
            strict=strict,
            timeout_seconds=None,
        )
    )


@functools.cache
def _library():
    # Sympy takes a second to import: only the processes that need it pay.
    import math_verify

    # It warns once that alarms are off; the process pool is what limits the time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    targets = (math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig())

    def parse(text: str):
        # Text that is no plain number is marked as an answer, so that all of it is read and not its last part.
        boxed = math_verify.parse(f"\\boxed{{{text}}}", targets, "no_fallback", parsing_timeout=None)
        return boxed or math_verify.parse(text, targets, "no_fallback", parsing_timeout=None)

    return parse, math_verify.verify


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> tuple:
    text = text.strip().strip("$").strip()
    for pattern, replacement in _SPELLING:
        text = pattern.sub(replacement, text)
    parse, _ = _library()
    return tuple(parse(text))


def _is_empty(parsed: tuple) -> bool:
    return any(getattr(one, "is_empty", None) is True for one in parsed)


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text.strip().strip("$"))
