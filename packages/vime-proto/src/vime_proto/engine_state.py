"""State machine of an inference engine, without I/O.

    STARTING -> SERVING <-> PAUSED
    SERVING, PAUSED, AWAKE_WEIGHTS, STALE -> RECEIVING -> SERVING (new version)
    RECEIVING -> where it came from, when nothing was loaded; STALE otherwise
    SERVING, PAUSED -> ASLEEP -> AWAKE_WEIGHTS -> RECEIVING or SERVING

The version changes on commit only. An engine drives the machine like this for an update:

    machine.check_begin_update(update_id, full=...)   # raises before anything happened
    came_from = machine.state
    machine.pause()                                   # only from SERVING: new requests wait from here on
    ...end, freeze or await what is in flight...
    machine.begin_update(update_id, full=..., busy=0, return_to=came_from)
    machine.first_byte()                              # right before the model's weights are touched
    machine.commit_update(update_id, version)         # or machine.fail_update(update_id, reason)
"""

from __future__ import annotations

import enum

import grpc

from vime_proto.common.v1.common_pb2 import PolicyVersion
from vime_proto.errors import ContractError, StatusError
from vime_proto.rollout.v1 import rollout_pb2

STARTING = rollout_pb2.ENGINE_STATE_STARTING
SERVING = rollout_pb2.ENGINE_STATE_SERVING
PAUSED = rollout_pb2.ENGINE_STATE_PAUSED
RECEIVING = rollout_pb2.ENGINE_STATE_RECEIVING
STALE = rollout_pb2.ENGINE_STATE_STALE
ASLEEP = rollout_pb2.ENGINE_STATE_ASLEEP
AWAKE_WEIGHTS = rollout_pb2.ENGINE_STATE_AWAKE_WEIGHTS

_PREFIX = "ENGINE_STATE_"


def state_name(state: int) -> str:
    """Short name of an EngineState, such as "SERVING"."""
    return rollout_pb2.EngineState.Name(state).removeprefix(_PREFIX)


class Admission(enum.Enum):
    """What a new Generate or Score call does in a state."""

    RUN = "run"
    WAIT = "wait"
    REFUSE = "refuse"  # answered UNAVAILABLE


_ADMISSION = {
    SERVING: Admission.RUN,
    PAUSED: Admission.WAIT,
    RECEIVING: Admission.WAIT,
    AWAKE_WEIGHTS: Admission.WAIT,
    STARTING: Admission.REFUSE,
    STALE: Admission.REFUSE,
    ASLEEP: Admission.REFUSE,
}


class EngineMachine:
    """State of one engine. Every method either makes its whole transition or raises StatusError and changes nothing.

    Refusals are FAILED_PRECONDITION (wrong state, wrong update, engine busy) or ContractError (a value that no state takes).
    Not thread-safe: the engine calls it under one lock or from one event loop.
    """

    def __init__(self) -> None:
        self.state: int = STARTING
        self.update_id = ""  # the open update
        self.sleep_level = 0  # when ASLEEP
        self.reason = ""  # when STALE
        self.loaded = False  # whether the open update touched the weights
        self._version: PolicyVersion | None = None
        self._kv_awake = True
        self._weights_lost = False  # by sleep level 2, until a full update committed
        self._return_to = SERVING  # where an update that loaded nothing goes back to
        self._after_kv_wake = SERVING

    # What it is -----------------------------------------------------------------------------------------------

    @property
    def version(self) -> PolicyVersion | None:
        """Weights to be trusted now (a copy); None when STALE or lost by sleep level 2."""
        if self._version is None:
            return None
        copy = PolicyVersion()
        copy.CopyFrom(self._version)
        return copy

    @property
    def admission(self) -> Admission:
        """What a new request does now."""
        return _ADMISSION[self.state]

    @property
    def needs_full_update(self) -> bool:
        """Whether a delta would be refused."""
        return self._version is None

    def fill(self, status: rollout_pb2.EngineStatus) -> rollout_pb2.EngineStatus:
        """Writes state, version, update_id, sleep_level and reason into `status`, and returns it."""
        status.state = self.state
        status.update_id = self.update_id
        status.sleep_level = self.sleep_level
        status.reason = self.reason if self.state == STALE else ""
        status.ClearField("version")
        if self._version is not None:
            status.version.CopyFrom(self._version)
        return status

    # Start, pause, resume -------------------------------------------------------------------------------------

    def started(self, version: PolicyVersion | None) -> None:
        """STARTING -> SERVING with `version`, or STALE when no weights are to be trusted yet (version None)."""
        self._require("finish starting", STARTING)
        if version is None:
            self.state, self.reason = STALE, "no weights loaded yet"
        else:
            self._set_version(version)
            self.state = SERVING

    def pause(self) -> None:
        """SERVING -> PAUSED; nothing to do when PAUSED."""
        self._require("pause", SERVING, PAUSED)
        self.state = PAUSED

    def resume(self) -> None:
        """PAUSED -> SERVING; nothing to do when SERVING."""
        self._require("resume", SERVING, PAUSED)
        self.state = SERVING

    # Sleep and wake -------------------------------------------------------------------------------------------

    def check_sleep(self, level: int) -> None:
        """Raises when sleep(level) would be refused for another reason than being busy."""
        if level not in (1, 2):
            raise ContractError("level", f"must be 1 (weights in host memory) or 2 (weights dropped), not {level}")
        if self.state == ASLEEP and level == self.sleep_level:
            return
        self._require("sleep", SERVING, PAUSED)

    def sleep(self, level: int, *, busy: int) -> None:
        """SERVING or PAUSED -> ASLEEP. `busy` is the number of engine steps running: memory is released only when it is 0."""
        self.check_sleep(level)
        if self.state == ASLEEP:
            return
        self._require_idle("sleep", busy)
        self.state, self.sleep_level, self._kv_awake = ASLEEP, level, False
        self._after_kv_wake = SERVING
        if level == 2:
            self._version, self._weights_lost = None, True

    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """ASLEEP -> AWAKE_WEIGHTS (weights) -> SERVING (kv_cache); one call may do both. What is awake already stays so.

        The KV cache is refused before the weights are there and, after level 2, before a full update committed.
        """
        if not (weights or kv_cache):
            raise ContractError("weights", "weights, kv_cache or both must be true")
        self._require("wake", ASLEEP, AWAKE_WEIGHTS, SERVING, PAUSED)
        if kv_cache and self.state == ASLEEP and not weights:
            raise self._refuse("wake the KV cache", "the weights must be awake first")
        if kv_cache and self._weights_lost and self.state in (ASLEEP, AWAKE_WEIGHTS):
            raise self._refuse(
                "wake the KV cache", "the weights were dropped by sleep level 2; a full update must commit first"
            )
        if self.state == ASLEEP:
            self.state, self.sleep_level = AWAKE_WEIGHTS, 0
        if kv_cache and self.state == AWAKE_WEIGHTS:
            self._kv_awake = True
            self.state = self._after_kv_wake

    # Weight update --------------------------------------------------------------------------------------------

    def check_begin_update(self, update_id: str, *, full: bool) -> None:
        """Raises when begin_update would be refused for another reason than being busy."""
        if not update_id:
            raise ContractError("manifest.update_id", "must not be empty")
        if self.state == RECEIVING:
            raise self._refuse(f"begin update {update_id!r}", f"update {self.update_id!r} is open")
        self._require(f"begin update {update_id!r}", SERVING, PAUSED, AWAKE_WEIGHTS, STALE)
        if not full and self.needs_full_update:
            raise self._refuse(
                f"begin update {update_id!r}", "a delta needs a base version, and this engine holds none"
            )

    def begin_update(self, update_id: str, *, full: bool, busy: int, return_to: int | None = None) -> None:
        """-> RECEIVING. `busy` is the number of engine steps running now and must be 0.

        `return_to` is the state before the pause that this update made, where it goes back to when nothing was loaded.
        """
        self.check_begin_update(update_id, full=full)
        self._require_idle(f"begin update {update_id!r}", busy)
        self._return_to = self.state if return_to is None else return_to
        self.state, self.update_id, self.loaded = RECEIVING, update_id, False

    def check_update(self, update_id: str) -> None:
        """Raises unless `update_id` is the open update."""
        if self.state != RECEIVING or self.update_id != update_id:
            opened = f"update {self.update_id!r} is open" if self.state == RECEIVING else "no update is open"
            raise self._refuse(f"go on with update {update_id!r}", opened)

    def first_byte(self) -> None:
        """The model's weights are about to change: from here on a failure leaves STALE. May be called again."""
        self._require("load weights", RECEIVING)
        self.loaded = True

    def commit_update(self, update_id: str, version: PolicyVersion, *, stay_paused: bool = False) -> None:
        """RECEIVING -> SERVING (or PAUSED) at `version`; AWAKE_WEIGHTS while the KV cache is still asleep."""
        self.check_update(update_id)
        self._set_version(version)
        self._weights_lost = False
        target = PAUSED if stay_paused else SERVING
        self._after_kv_wake = target
        self.state = target if self._kv_awake else AWAKE_WEIGHTS
        self.update_id, self.loaded, self.reason = "", False, ""

    def fail_update(self, update_id: str, reason: str) -> None:
        """Ends the open update: back to where it came from when nothing was loaded, STALE otherwise."""
        self.check_update(update_id)
        if self.loaded:
            self.go_stale(f"update {update_id!r}: {reason}")
            return
        self.state, self.update_id = self._return_to, ""

    def go_stale(self, reason: str) -> None:
        """Any state but ASLEEP and STARTING -> STALE: the weights cannot be trusted (also: their lineage is dead)."""
        self._require("go stale", SERVING, PAUSED, RECEIVING, AWAKE_WEIGHTS, STALE)
        self.state, self.reason = STALE, reason or "unknown"
        self.update_id, self.loaded, self._version = "", False, None

    # Helpers --------------------------------------------------------------------------------------------------

    def _set_version(self, version: PolicyVersion) -> None:
        if not (version.run_id and version.HasField("lineage") and version.HasField("number")):
            raise ContractError("version", "run_id, lineage and number must be set")
        copy = PolicyVersion()
        copy.CopyFrom(version)
        self._version = copy

    def _require(self, action: str, *states: int) -> None:
        if self.state not in states:
            raise self._refuse(action, "possible in " + ", ".join(state_name(s) for s in states))

    def _require_idle(self, action: str, busy: int) -> None:
        if busy:
            raise self._refuse(action, f"{busy} engine steps are running")

    def _refuse(self, action: str, why: str) -> StatusError:
        about = f" ({self.reason})" if self.reason else ""
        return StatusError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"cannot {action}: the engine is {state_name(self.state)}{about}; {why}",
        )
