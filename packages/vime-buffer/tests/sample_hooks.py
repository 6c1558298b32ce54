"""Hooks that use nothing but the public interface."""

from vime_buffer import KEEP, FilterDecision, drop

calls = {"format": 0}


def as_text(record):
    return f"{record['a']}+{record['b']}="


def as_messages(record):
    return [{"role": "user", "content": f"{record['a']} plus {record['b']}"}]


def no_sevens(record):
    if record["a"] == 7:
        raise RuntimeError("sevens are unlucky")
    return f"{record['a']}+{record['b']}="


def second_time(record):
    calls["format"] += 1
    if record["a"] == 1 and calls["format"] < 5:
        raise RuntimeError("not yet")
    return f"{record['a']}+{record['b']}="


def wrong_type(record):
    return 7 if record["a"] else "first"


def keep_best(group):
    return KEEP if any(rollout.reward >= 1 for rollout in group.rollouts) else drop("nobody_solved_it")


def broken(group):
    raise RuntimeError("division by zero")


def no_decision(group):
    return True


def no_reason(group):
    return FilterDecision(False)
