"""Finds the answer in a response: past the reasoning, in the last box, after "Answer:"."""

from __future__ import annotations

import re

# \fbox and \boxed mark answers alike; "\boxed 5" boxes one word.
_BOX_OR_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)(?![a-zA-Z])\s*\{?)|\\.|[{}]", re.DOTALL)
_SHORT = re.compile(r"\\[a-zA-Z]+|[^\s.,;${}\\]+")
# What is longer is no answer, and not worth rewriting.
_LONGEST = 4000
_ANSWER = re.compile(r"(?:final\s+answer|answer)\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|operatorname|mbox|hbox)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[,;:! ]")
_DELIMITERS = re.compile(r"\\(?:(?:left|right|displaystyle)(?![a-zA-Z])|[()\[\]])")


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
    r"""Content of the last (and innermost) ``\boxed{...}`` or ``\fbox{...}``, braces matched; None when none closes."""
    if "box" not in text:
        return None
    found, where, open_braces = None, -1, []
    # One pass, whatever the text: responses are adversaries.
    for match in _BOX_OR_BRACE.finditer(text):
        word = match.group()
        if word == "}":
            if open_braces and (start := open_braces.pop()) > where:
                found, where = text[start : match.start()], start
        elif word.endswith("{"):
            open_braces.append(match.end() if match.lastgroup else -1)
        elif match.lastgroup and (short := _SHORT.match(text, match.end())):
            found, where = short.group(), match.end()
    return found


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
    if len(text) > _LONGEST:
        return text.strip()
    if "\\" in text:
        previous = None
        while previous != text:
            previous, text = text, _TEXT.sub(r"\1", text)
        text = _DELIMITERS.sub("", _SPACES.sub(" ", text.replace("\\$", "")))
    return " ".join(text.replace("$", "").replace("~", " ").split()).removesuffix(".").strip()
