"""Finds the answer in a response: past the reasoning, in the last box, after "Answer:"."""

from __future__ import annotations

import re

# \fbox and \boxed mark answers alike; "\boxed 5" boxes one character or word.
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[^\s{]))")
_ANSWER = re.compile(r"(?:final\s+answer|answer)\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|operatorname|mbox|hbox)\s*\{([^{}]*)\}")


def after_thinking(response: str, prompt_text: str = "", start: str = "<think>", end: str = "</think>") -> str | None:
    """The part of a response that follows its reasoning; None when the reasoning was never closed.

    Reasoning counts as opened when the response opens it, or when the prompt ends inside it.
    """
    if not start or not end:
        return response
    _, closed, rest = response.rpartition(end)
    if closed:
        return None if start in rest else rest
    opened = start in response or prompt_text.rfind(start) > prompt_text.rfind(end)
    return None if opened else response


def last_box(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}`` or ``\fbox{...}``, braces matched; None when there is none that closes."""
    found = None
    for match in _BOX.finditer(text):
        if not match.group().endswith("{"):
            found = (
                re.match(r"\\[a-zA-Z]+|[^\s.,;$]+", text[match.end() :]).group() if match.end() < len(text) else None
            )
            continue
        content = _braced(text, match.end())
        if content is not None:
            found = content
    if found is not None and (inner := last_box(found)) is not None:
        return inner
    return found


def _braced(text: str, start: int) -> str | None:
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return text[start : match.start()]
    return None


def final_answer(text: str) -> str:
    """The last box; else what follows the last "answer is" or "Answer:" on its line; else the whole text."""
    box = last_box(text)
    if box is not None:
        return box.strip()
    matches = list(_ANSWER.finditer(text))
    if matches:
        line = text[matches[-1].end() :].strip().partition("\n")[0].strip()
        if line:
            return line
    return text.strip()


def plain(text: str) -> str:
    r"""Text without what does not change its meaning: ``\text{}``, dollar signs, outer brackets and full stop, spaces."""
    previous = None
    while previous != text:
        previous, text = text, _TEXT.sub(r"\1", text)
    text = text.replace("\\$", "").replace("$", "")
    text = re.sub(r"\\[,;:! ]|~", " ", text)
    text = re.sub(r"\\(?:left|right|displaystyle)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[()\[\]]", "", text)
    return re.sub(r"\s+", " ", text).strip().removesuffix(".").strip()
