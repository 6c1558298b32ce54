"""The engines behind the router: registration, leases, eligibility. No I/O; the clock is injected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
    """

    def __init__(self, policy: Policy, health: HealthSettings, clock: Callable[[], float]):
        self.members: dict[str, Member] = {}
        self.minimum_version: common_pb2.PolicyVersion | None = None
        self._policy = policy
        self._health = health
        self._clock = clock
        self._changed = asyncio.Event()

    def register(self, engine_id: str, address: str, labels: dict[str, str], lease_seconds: float | None) -> Member:
        """Adds an engine, or renews the lease of the one that is there.

        Raises:
            StatusError: ALREADY_EXISTS, when a live engine holds the id at another address.
        """
        self.drop_expired()
        expires = None if lease_seconds is None else self._clock() + lease_seconds
        known = self.members.get(engine_id)
        if known is not None and known.address == address:
            known.expires, known.labels = expires, labels
            return known
        if known is not None:
            raise StatusError(
                grpc.StatusCode.ALREADY_EXISTS,
                f"engine_id {engine_id!r} is registered at {known.address}; deregister it before it moves to {address}",
            )
        member = self.members[engine_id] = Member(engine_id, address, self._health, labels, expires)
        self.touch()
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
        """Takes an engine out."""
        self.get(engine_id)
        self.touch()
        return self.members.pop(engine_id)

    def drop_expired(self) -> list[str]:
        """Takes out engines whose lease ran out, and drained ones without requests that were to go; answers their ids."""
        now = self._clock()
        gone = [
            one.engine_id
            for one in self.members.values()
            if (one.expires is not None and one.expires <= now)
            or (one.draining and one.remove_when_idle and one.outstanding_requests == 0)
        ]
        for engine_id in gone:
            del self.members[engine_id]
        return gone

    def choose(self, estimated_tokens: int, minimum: common_pb2.PolicyVersion | None, avoid: set[str]) -> Member | None:
        """An engine for a request; None when none may take it. Engines in ``avoid`` are taken only when there is no other."""
        eligible = [
            one
            for one in self.members.values()
            if not one.obstacle(self.minimum_version) and (minimum is None or not one.obstacle(minimum))
        ]
        # An engine that is being updated keeps the request until it serves again: better one that serves now.
        for preferred in (
            [one for one in eligible if one.serving and one.engine_id not in avoid],
            [one for one in eligible if one.engine_id not in avoid],
            eligible,
        ):
            if preferred:
                break
        else:
            return None
        candidates = [
            Candidate(one.engine_id, one.outstanding_requests, one.outstanding_tokens)
            for one in sorted(preferred, key=lambda member: member.engine_id)
        ]
        return self.members[self._policy.choose(candidates, estimated_tokens).engine_id]

    def obstacles(self, minimum: common_pb2.PolicyVersion | None) -> str:
        """Why no engine can be chosen, for an error's text."""
        if not self.members:
            return "no engine is registered"
        bound = minimum if minimum is not None else self.minimum_version
        return "; ".join(f"{one.engine_id}: {one.obstacle(bound)}" for one in self.members.values())

    def touch(self) -> None:
        """Wakes requests that wait for an engine."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout: float) -> None:
        """Waits for a change, at most ``timeout`` seconds."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout)
        except TimeoutError:
            return
