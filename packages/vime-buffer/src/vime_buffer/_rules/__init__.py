"""The buffer's decisions as pure functions: no I/O, no clock of their own."""

from vime_buffer._rules.attempts import after_failed_attempt
from vime_buffer._rules.capacity import Limits, Occupancy, capacity, check_limits, minimum_number
from vime_buffer._rules.clock import LeaseClock
from vime_buffer._rules.permutation import permutation
from vime_buffer._rules.staleness import alive, is_too_old, oldest_number, pack_versions, unpack_versions

__all__ = [
    "LeaseClock",
    "Limits",
    "Occupancy",
    "after_failed_attempt",
    "alive",
    "capacity",
    "check_limits",
    "is_too_old",
    "minimum_number",
    "oldest_number",
    "pack_versions",
    "permutation",
    "unpack_versions",
]
