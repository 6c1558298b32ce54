"""One engine of the fleet, without I/O."""

from __future__ import annotations

from vime_proto.common.v1 import common_pb2
from vime_proto.rollout.v1 import rollout_pb2
from vime_proto.router.v1 import router_pb2 as pb
from vime_proto.version import satisfies, show
from vime_router.settings import HealthSettings

# In these states an engine holds requests until it can generate, so that a router may send them.
_TAKES_REQUESTS = {
    rollout_pb2.ENGINE_STATE_SERVING,
    rollout_pb2.ENGINE_STATE_PAUSED,
    rollout_pb2.ENGINE_STATE_RECEIVING,
    rollout_pb2.ENGINE_STATE_AWAKE_WEIGHTS,
}


class Member:
    """What the router knows of an engine: registration, health with hysteresis, status, load.

    Attributes:
        gone: it has left the fleet; requests that it still has may end.
        messages: answers that it has sent, a sign of life besides its checks.
    """

    def __init__(
        self, engine_id: str, address: str, health: HealthSettings, labels: dict[str, str], expires: float | None
    ):
        self.engine_id = engine_id
        self.address = address
        self.labels = labels
        self.expires = expires
        self.status: rollout_pb2.EngineStatus | None = None
        self.draining = False
        self.remove_when_idle = False
        self.gone = False
        self.outstanding_requests = 0
        self.outstanding_tokens = 0
        self.requests_total = 0
        self.failures_total = 0
        self.messages = 0
        self._settings = health
        self._incarnation = ""
        self._healthy = False
        self._checked = False
        self._good_in_a_row = 0
        self._bad_in_a_row = 0
        self._fault = "not checked yet"

    @property
    def healthy(self) -> bool:
        """Whether it answers."""
        return self._healthy

    @property
    def serving(self) -> bool:
        """Whether it generates right now, at its last check."""
        return self.status is not None and self.status.state == rollout_pb2.ENGINE_STATE_SERVING

    @property
    def idle(self) -> bool:
        """Whether the router has nothing on it."""
        return self.outstanding_requests == 0

    def saw_incarnation(self, incarnation: str) -> None:
        """The engine names its present life. Draining meant the earlier one: whoever started it again wants it to serve."""
        if self._incarnation and incarnation and incarnation != self._incarnation:
            self.draining = self.remove_when_idle = False
        self._incarnation = incarnation or self._incarnation

    def saw_good(self, status: rollout_pb2.EngineStatus) -> None:
        """Takes the result of a good check."""
        self.status = status
        self._good_in_a_row += 1
        self._bad_in_a_row = 0
        # A new engine is taken in at its first good check; one that failed must show that it is back.
        if not self._checked or self._good_in_a_row >= self._settings.healthy_after:
            self._checked, self._healthy, self._fault = True, True, ""

    def saw_bad(self, reason: str) -> None:
        """Takes the result of a failed check, or of a call that could not reach the engine."""
        self._checked = True
        self._bad_in_a_row += 1
        self._good_in_a_row = 0
        if self._bad_in_a_row >= self._settings.unhealthy_after or not self._healthy:
            self._healthy, self._fault = False, reason

    def saw_refusal(self, reason: str) -> None:
        """Takes the engine's own word that it does not serve: no hysteresis."""
        self._checked, self._healthy, self._fault = True, False, reason
        self._good_in_a_row = 0

    def obstacle(self, minimum: common_pb2.PolicyVersion | None) -> str:
        """Why it may not get a new request; empty when it may."""
        return "draining" if self.draining else self.fault(minimum)

    def fault(self, minimum: common_pb2.PolicyVersion | None) -> str:
        """Why it cannot answer a request, draining or not; empty when it can."""
        if not self._healthy:
            return self._fault
        state = self.status.state
        if state not in _TAKES_REQUESTS:
            name = rollout_pb2.EngineState.Name(state).removeprefix("ENGINE_STATE_")
            return f"{name}: {self.status.reason}" if self.status.reason else name
        if minimum is not None:
            has = self.status.HasField("version")
            if not has or not satisfies(self.status.version, minimum):
                return f"at version {show(self.status.version) if has else 'none'}, needs {show(minimum)}"
        return ""

    def entry(self, minimum: common_pb2.PolicyVersion | None, now: float) -> pb.EngineEntry:
        """The engine as the contract shows it."""
        reason = self.obstacle(minimum)
        if self.draining:
            health = pb.ENGINE_HEALTH_DRAINING
        elif not self._healthy:
            health = pb.ENGINE_HEALTH_UNHEALTHY
        else:
            health = pb.ENGINE_HEALTH_INELIGIBLE if reason else pb.ENGINE_HEALTH_HEALTHY
        entry = pb.EngineEntry(
            engine_id=self.engine_id,
            address=self.address,
            health=health,
            outstanding_requests=self.outstanding_requests,
            outstanding_tokens=self.outstanding_tokens,
            requests_total=self.requests_total,
            failures_total=self.failures_total,
            reason=reason,
            labels=self.labels,
        )
        if self.status is not None:
            entry.status.CopyFrom(self.status)
        if self.expires is not None:
            entry.lease_seconds = max(0.0, self.expires - now)
        return entry
