"""Rewards that are cheap enough to run where they are asked for."""

from __future__ import annotations

import functools
from fractions import Fraction

from vime_rollout.rewards._extract import after_thinking, final_answer, last_box, plain
from vime_rollout.rewards._number import Number, read_number
from vime_rollout.rewards._types import RewardError, RewardInput


def reference(item: RewardInput) -> str:
    """The reference answer.

    Raises:
        RewardError: the prompt has none.
    """
    if item.answer is None:
        raise RewardError(f"prompt {item.prompt_id!r} has no answer to compare with")
    return item.answer


def exact(
    item: RewardInput,
    *,
    ignore_case: bool = False,
    extract: bool = True,
    thinking_start: str = "<think>",
    thinking_end: str = "</think>",
) -> float:
    r"""1.0 when the response is the reference answer, up to surrounding space.

    Args:
        ignore_case: whether case counts.
        extract: whether the last ``\boxed{}``, or what follows "Answer:", may be the answer instead of the whole response.
        thinking_start, thinking_end: tags around reasoning, which never counts; a response that ends inside it gets 0.
    """
    want = reference(item).strip()
    text = after_thinking(item.response, item.prompt_text, thinking_start, thinking_end)
    if text is None:
        return 0.0
    text = text.strip()
    if text == want:
        return 1.0
    candidates = [text]
    if extract:
        answer = final_answer(text)
        candidates += [answer, plain(answer)]
        want = final_answer(want) if last_box(want) is not None else want
    wanted = {want, plain(want)} if extract else {want}
    if ignore_case:
        wanted, candidates = {one.casefold() for one in wanted}, [one.casefold() for one in candidates]
    # An empty answer equals nothing but an empty reference, which was compared above.
    return float(any(one in wanted for one in candidates if one))


@functools.lru_cache(maxsize=4096)
def _gold(answer: str) -> Number | None:
    return read_number(final_answer(answer)) or read_number(final_answer(answer), lone=False)


def numeric(
    item: RewardInput,
    *,
    relative_tolerance: float = 0.0,
    absolute_tolerance: float = 0.0,
    thinking_start: str = "<think>",
    thinking_end: str = "</think>",
) -> float:
    r"""1.0 when the answer of the response is the number of the reference, compared as exact fractions.

    The answer is the last ``\boxed{}``, else what follows "Answer:", else the last number of the response. Units, thousands
    separators, LaTeX fractions and percent signs are understood: 50% equals both 50 % and, where the reference has no
    percent sign, 50 and 0.5. Nothing is evaluated.

    Args:
        relative_tolerance: largest difference, as a share of the reference's magnitude.
        absolute_tolerance: largest difference.
        thinking_start, thinking_end: tags around reasoning, which never counts; a response that ends inside it gets 0.

    Raises:
        RewardError: the prompt has no reference, or one that is no number.
    """
    gold = _gold(reference(item))
    if gold is None:
        raise RewardError(f"the answer {item.answer!r} of prompt {item.prompt_id!r} is no number")
    text = after_thinking(item.response, item.prompt_text, thinking_start, thinking_end)
    if text is None:
        return 0.0
    answer = final_answer(text)
    marked = answer != text.strip()
    found = read_number(answer) if marked else read_number(answer) or read_number(answer, lone=False)
    if found is None:
        return 0.0
    limit = max(Fraction(absolute_tolerance), abs(gold.value) * Fraction(relative_tolerance))
    values = {found.value}
    if found.percent != gold.percent:
        values.add(found.value / 100 if found.percent else found.value * 100)
    return float(any(abs(value - gold.value) <= limit for value in values))
