"""When a prompt that keeps failing is given up."""

from __future__ import annotations


def after_failed_attempt(failures: int, max_attempts: int) -> tuple[int, bool]:
    """(failures counting this one, whether the prompt is dropped).

    Only attempts that the prompt may have caused count: failed rollouts, refused samples, groups that came too late, a lease
    given back as failed. A holder that died, a restore or a restart does not count.
    """
    failures += 1
    return failures, failures >= max_attempts
