"""Finds hooks by name or import path, and calls them so that an error names what it was about."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from vime_buffer._filters import GROUP_FILTERS
from vime_buffer.hooks import FilterDecision, GroupFilter, MessageFormat
from vime_proto.errors import ContractError, nearest
from vime_proto.sample.v1 import sample_pb2


class HookError(Exception):
    """A hook raised, or answered something else than it should; the text names the hook and what it was given."""


def load_group_filter(name: str) -> GroupFilter:
    """A built-in filter by name, or one by import path.

    Raises:
        ContractError: there is none of this name.
    """
    if name in GROUP_FILTERS:
        return GROUP_FILTERS[name]
    if ":" not in name:
        raise ContractError("group_filter", nearest(name, [*GROUP_FILTERS, "module:function"], "group filter"))
    return load_path(name, "group_filter")


def load_message_format(name: str) -> MessageFormat:
    """A message format by import path."""
    return load_path(name, "message_format")


def load_path(path: str, field: str) -> Callable[..., Any]:
    """The callable at ``module:attribute``.

    Raises:
        ContractError: of another form, no such module or attribute (with the nearest names), or not callable.
    """
    module_name, colon, attribute = path.partition(":")
    if not (colon and module_name and attribute):
        raise ContractError(field, f"{path!r} is not of the form module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ContractError(
            field, f"{path!r}: cannot import {module_name!r}: {type(error).__name__}: {error}"
        ) from error
    target = getattr(module, attribute, None)
    if target is None:
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ContractError(field, f"{path!r}: {nearest(attribute, names, 'function')}")
    if not callable(target):
        raise ContractError(field, f"{path!r} is not callable")
    return target


def apply_filter(hook: GroupFilter, name: str, group: sample_pb2.Group) -> FilterDecision:
    """The hook's decision.

    Raises:
        HookError: names the hook and the group.
    """
    try:
        decision = hook(group)
    except Exception as error:
        raise HookError(
            f"group_filter {name!r} raised {type(error).__name__}: {error} on group {group.group_id!r}"
        ) from error
    if not isinstance(decision, FilterDecision) or not (decision.keep or decision.reason):
        raise HookError(
            f"group_filter {name!r} answered {decision!r} on group {group.group_id!r}; "
            "valid: FilterDecision(True) or FilterDecision(False, reason)"
        )
    return decision


def apply_format(
    hook: MessageFormat, name: str, record: Mapping[str, Any], where: str, prompt: sample_pb2.Prompt
) -> None:
    """Sets a prompt's input as the hook says.

    Raises:
        HookError: names the hook, and the row by file and line.
    """
    try:
        made = hook(record)
    except Exception as error:
        raise HookError(f"message_format {name!r} raised {type(error).__name__}: {error} on {where}") from error
    if isinstance(made, str):
        prompt.text = made
    elif isinstance(made, sample_pb2.Prompt):
        own = sample_pb2.Prompt()
        own.CopyFrom(made)
        for field in ("prompt_id", "record_json", "dataset", "row", "epoch"):
            own.ClearField(field)
        prompt.MergeFrom(own)
    elif isinstance(made, (list, tuple)):
        prompt.messages_json = json.dumps(list(made), ensure_ascii=False)
    else:
        raise HookError(
            f"message_format {name!r} answered a {type(made).__name__} on {where}; valid: text, list of messages, Prompt"
        )
