"""Chat turns as token ids. The conversation is rendered and encoded once, as a whole."""

from __future__ import annotations

from typing import Any, Literal

__all__ = ["chat_example"]


def chat_example(
    messages: Any, tools: Any, tokenizer: Any, turns: Literal["all", "last"]
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation and which of them an assistant wrote.

    Spans of assistant turns are found by rendering what precedes each turn, with the generation prompt; ids always come
    from the one full rendering. A turn's span ends after its end token: separators that the template adds before the
    next turn are never generated, so they are not learnt.

    Args:
        messages: list of {"role", "content", ...}.
        tools: as the chat template takes them.
        tokenizer: a transformers tokenizer with a chat template.
        turns: learn every assistant turn, or the last one.

    Raises:
        ValueError: no list of turns, no assistant turn, or a template that changes earlier turns when later ones come.
    """
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("messages must be a list of objects with a role")
    spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not spoken:
        raise ValueError("messages have no assistant turn to learn")
    if turns == "last":
        spoken, messages = spoken[-1:], messages[: spoken[-1] + 1]

    def render(part: list[dict[str, Any]], prompt: bool) -> str:
        return tokenizer.apply_chat_template(part, tools=tools, tokenize=False, add_generation_prompt=prompt)

    full = render(messages, False)
    spans = []
    for index in spoken:
        before = render(messages[:index], True)
        after = render(messages[: index + 1], False)
        end = _end(after, len(before), tokenizer.eos_token)
        if not (after.startswith(before) and full.startswith(after[:end])):
            hint = "; set data.train_turns = 'last'" if turns == "all" else ""
            raise ValueError(f"turn {index}: the chat template renders it in another way when later turns follow{hint}")
        spans.append((len(before), end))
    encoded = tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
    learnt = [any(begin <= start and stop <= end for begin, end in spans) for start, stop in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), learnt


def _end(after: str, begin: int, eos: str | None) -> int:
    """Where the turn that starts at `begin` ends: after its end token, or with the text if it has none."""
    close = after.rfind(eos, begin) if eos else -1
    return close + len(eos) if close >= 0 and eos else len(after)
