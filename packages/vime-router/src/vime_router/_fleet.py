"""The engines behind the router: registration, leases, eligibility. No I/O; the clock is injected."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import grpc

from vime_proto.common.v1 import common_pb2
from vime_proto.errors import StatusError
from vime_router._member import Member
from vime_router.policies import Candidate, Policy
from vime_router.settings import HealthSettings


class Fleet:
    """Members by id, the minimum version, and the choice of one for a request.

    Args:
        policy: chooses among eligible engines.
        health: hysteresis of health.
        clock: seconds, monotonic.

    Attributes:
        on_change: called when an engine may have become eligible.
        on_leave: called with a member that left and why. Requests that it has may go on when its lease ran out; they end
            when it was removed.
    """

    def __init__(self, policy: Policy, health: HealthSettings, clock: Callable[[], float]):
        self.members: dict[str, Member] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.on_leave: Callable[[Member, str], None] = lambda member, reason: None
        self._minimum_version: common_pb2.PolicyVersion | None = None
        self._policy = policy
        self._health = health
        self._clock = clock

    @property
    def minimum_version(self) -> common_pb2.PolicyVersion | None:
        """The lowest version that gets requests, if there is a bound."""
        return self._minimum_version

    @minimum_version.setter
    def minimum_version(self, version: common_pb2.PolicyVersion | None) -> None:
        self._minimum_version = version
        self.on_change()

    def register(self, engine_id: str, address: str, labels: dict[str, str], lease_seconds: float | None) -> Member:
        """Adds an engine, or renews the lease of the one that is there.

        An engine that does not answer any more gives its id up to one at another address: it was restarted there.

        Raises:
            StatusError: ALREADY_EXISTS, when a live engine holds the id at another address.
        """
        self.sweep()
        expires = None if lease_seconds is None else self._clock() + lease_seconds
        known = self.members.get(engine_id)
        if known is not None and known.address == address:
            known.expires, known.labels = expires, labels
            return known
        if known is not None and known.healthy:
            raise StatusError(
                grpc.StatusCode.ALREADY_EXISTS,
                f"engine_id {engine_id!r} is registered at {known.address}; deregister it before it moves to {address}",
            )
        if known is not None:
            self._leave(known, f"it registered again at {address}")
        member = self.members[engine_id] = Member(engine_id, address, self._health, labels, expires)
        return member

    def get(self, engine_id: str) -> Member:
        """The engine.

        Raises:
            StatusError: NOT_FOUND, with the ids that are known.
        """
        if engine_id not in self.members:
            known = ", ".join(sorted(self.members)) or "none"
            raise StatusError(
                grpc.StatusCode.NOT_FOUND, f"engine_id {engine_id!r} is not registered; registered: {known}"
            )
        return self.members[engine_id]

    def remove(self, engine_id: str) -> Member:
        """Takes an engine out; raises as ``get``."""
        member = self.get(engine_id)
        member.gone = True
        self._leave(member, "it was deregistered")
        return member

    def drain(self, engine_id: str, then_remove: bool = False, undo: bool = False) -> Member:
        """Sends an engine nothing new, or takes it in again; raises as ``get``."""
        member = self.get(engine_id)
        member.draining = not undo
        member.remove_when_idle = then_remove and not undo
        if undo:
            self.on_change()
        return member

    def sweep(self) -> None:
        """Takes out engines whose lease ran out, and drained ones without requests that were to go."""
        now = self._clock()
        for member in list(self.members.values()):
            if member.expires is not None and member.expires <= now:
                self._leave(member, "its lease ran out")
            elif member.draining and member.remove_when_idle and member.idle:
                self._leave(member, "it was drained")

    def choose(
        self, estimated_tokens: int, minimum: common_pb2.PolicyVersion | None, avoid: Iterable[str] = ()
    ) -> Member | None:
        """An engine for a request; None when none may take it. Those in ``avoid`` are taken only when there is no other."""
        eligible = [
            one
            for one in self.members.values()
            if not one.obstacle(self._minimum_version) and (minimum is None or not one.fault(minimum))
        ]
        fresh = [one for one in eligible if one.engine_id not in avoid] or eligible
        # An engine that is being updated keeps the request until it serves again: better one that serves now.
        preferred = [one for one in fresh if one.serving] or fresh
        if not preferred:
            return None
        preferred.sort(key=lambda member: member.engine_id)
        candidates = [Candidate(one.engine_id, one.outstanding_requests, one.outstanding_tokens) for one in preferred]
        return self.members[self._policy.choose(candidates, estimated_tokens).engine_id]

    def newest_version(self) -> common_pb2.PolicyVersion | None:
        """The newest version that an engine serves; None when none is known."""
        known = [
            one.status.version
            for one in self.members.values()
            if one.status is not None and one.status.HasField("version")
        ]
        return max(known, key=lambda version: (version.lineage, version.number), default=None)

    def obstacles(self, minimum: common_pb2.PolicyVersion | None) -> str:
        """Why no engine can be chosen, for an error's text."""
        if not self.members:
            return "no engine is registered"
        return "; ".join(
            f"{one.engine_id}: {one.obstacle(self._minimum_version) or one.fault(minimum) or 'eligible just now'}"
            for one in self.members.values()
        )

    def _leave(self, member: Member, reason: str) -> None:
        del self.members[member.engine_id]
        self.on_leave(member, reason)
