"""Members and fleet without I/O."""

import random

import grpc
import pytest

from vime_proto.errors import StatusError
from vime_proto.rollout.v1 import rollout_pb2
from vime_proto.router.v1 import router_pb2 as pb
from vime_proto.version import policy_version
from vime_router._fleet import Fleet
from vime_router._member import Member
from vime_router.policies import make_policy
from vime_router.settings import HealthSettings

SERVING = rollout_pb2.ENGINE_STATE_SERVING


def status(state=SERVING, number=1, lineage=0, reason=""):
    version = policy_version("run", lineage, number) if number is not None else None
    return rollout_pb2.EngineStatus(state=state, version=version, reason=reason)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fleet(clock):
    return Fleet(make_policy("round_robin", random.Random(0)), HealthSettings(), clock)


def join(fleet, engine_id, address="h:1", lease=None, **more):
    member = fleet.register(engine_id, address, {}, lease)
    member.saw_good(status(**more))
    return member


def test_health_has_hysteresis():
    member = Member("a", "h:1", HealthSettings(unhealthy_after=3, healthy_after=2), {}, None)
    assert member.obstacle(None) == "not checked yet"
    member.saw_good(status())
    for _ in range(2):
        member.saw_bad("no answer")
    assert not member.obstacle(None)
    member.saw_bad("no answer")
    assert member.obstacle(None) == "no answer"
    member.saw_good(status())
    assert member.obstacle(None) == "no answer"
    member.saw_good(status())
    assert not member.obstacle(None)
    member.saw_refusal("health is NOT_SERVING")
    assert member.obstacle(None) == "health is NOT_SERVING"


def test_an_engine_that_never_answered_is_out_at_once():
    member = Member("a", "h:1", HealthSettings(), {}, None)
    member.saw_bad("refused")
    assert member.obstacle(None) == "refused"
    assert member.entry(None, 0).health == pb.ENGINE_HEALTH_UNHEALTHY


@pytest.mark.parametrize("state", ["ASLEEP", "STALE", "STARTING", "UNSPECIFIED"])
def test_states_that_refuse_requests_are_ineligible(fleet, state):
    member = join(fleet, "a", state=rollout_pb2.EngineState.Value(f"ENGINE_STATE_{state}"), reason="why")
    assert fleet.choose(1, None) is None
    entry = member.entry(None, 0)
    assert entry.health == pb.ENGINE_HEALTH_INELIGIBLE and entry.reason == f"{state}: why"


@pytest.mark.parametrize("state", ["PAUSED", "RECEIVING", "AWAKE_WEIGHTS"])
def test_engines_that_hold_requests_are_taken_when_none_serves(fleet, state):
    waiting = join(fleet, "a", state=rollout_pb2.EngineState.Value(f"ENGINE_STATE_{state}"))
    assert fleet.choose(1, None) is waiting
    serving = join(fleet, "b", "h:2")
    assert {fleet.choose(1, None).engine_id for _ in range(4)} == {serving.engine_id}


@pytest.mark.parametrize(
    ("number", "lineage", "eligible"), [(3, 1, True), (4, 1, True), (2, 1, False), (9, 0, False), (None, 0, False)]
)
def test_minimum_version(fleet, number, lineage, eligible):
    member = join(fleet, "a", number=number, lineage=lineage)
    fleet.minimum_version = policy_version("run", 1, 3)
    assert (fleet.choose(1, None) is member) == eligible
    if not eligible:
        assert "needs run/1:3" in fleet.obstacles(None)
    fleet.minimum_version = None
    assert fleet.choose(1, None) is member
    assert (fleet.choose(1, policy_version("run", 1, 3)) is member) == eligible


def test_leases_lapse_and_are_renewed(fleet, clock):
    left = []
    fleet.on_leave = lambda member, reason: left.append((member.engine_id, reason))
    join(fleet, "a", lease=5)
    join(fleet, "b")
    clock.now += 4
    fleet.register("a", "h:1", {"pool": "x"}, 5)
    clock.now += 4
    fleet.sweep()
    assert sorted(fleet.members) == ["a", "b"] and fleet.members["a"].labels == {"pool": "x"}
    clock.now += 1
    fleet.sweep()
    assert sorted(fleet.members) == ["b"] and left == [("a", "its lease ran out")]


def test_an_id_belongs_to_one_live_address(fleet):
    first = join(fleet, "a")
    with pytest.raises(StatusError, match="registered at h:1; deregister it") as refusal:
        fleet.register("a", "h:2", {}, None)
    assert refusal.value.code is grpc.StatusCode.ALREADY_EXISTS
    for _ in range(3):
        first.saw_bad("refused")
    assert fleet.register("a", "h:2", {}, None) is not first


def test_drained_engines_leave_when_they_are_idle(fleet):
    member = join(fleet, "a")
    member.outstanding_requests = 1
    fleet.drain("a", then_remove=True)
    fleet.sweep()
    assert "a" in fleet.members and fleet.choose(1, None) is None
    fleet.drain("a", undo=True)
    assert fleet.choose(1, None) is member
    fleet.drain("a", then_remove=True)
    member.outstanding_requests = 0
    fleet.sweep()
    assert "a" not in fleet.members


def test_engines_to_avoid_are_a_last_resort(fleet):
    join(fleet, "a")
    assert fleet.choose(1, None, {"a"}).engine_id == "a"
    join(fleet, "b", "h:2", state=rollout_pb2.ENGINE_STATE_PAUSED)
    assert fleet.choose(1, None, {"a"}).engine_id == "b"


def test_unknown_engines_are_named_with_those_that_are_known(fleet):
    join(fleet, "a")
    for call in (fleet.get, fleet.remove, fleet.drain):
        with pytest.raises(StatusError, match="'x' is not registered; registered: a"):
            call("x")
