"""The engine's state machine."""

import grpc
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vime_proto import engine_state as es
from vime_proto.engine_state import Admission, EngineMachine
from vime_proto.errors import ContractError, StatusError
from vime_proto.rollout.v1 import rollout_pb2 as pb
from vime_proto.version import policy_version


def _version(number: int):
    return policy_version("run", 0, number)


def _serving() -> EngineMachine:
    machine = EngineMachine()
    machine.started(_version(0))
    return machine


def _refused(call, text: str = ""):
    with pytest.raises(StatusError) as caught:
        call()
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert text in caught.value.message, caught.value.message


def _updated(machine: EngineMachine, number: int = 1, **options) -> None:
    machine.begin_update("u", full=True, busy=0)
    machine.first_byte()
    machine.commit_update("u", _version(number), **options)


def test_a_whole_update():
    machine = _serving()
    came_from = machine.state
    machine.pause()
    machine.begin_update("u", full=True, busy=0, return_to=came_from)
    assert (machine.state, machine.version.number, machine.update_id) == (es.RECEIVING, 0, "u")
    machine.first_byte()
    assert machine.version.number == 0, "the version changes on commit only"
    machine.commit_update("u", _version(1))
    assert (machine.state, machine.version.number, machine.update_id) == (es.SERVING, 1, "")


def test_an_engine_without_weights_starts_stale():
    machine = EngineMachine()
    assert machine.admission is Admission.REFUSE
    machine.started(None)
    assert machine.state == es.STALE and machine.reason
    _refused(lambda: machine.begin_update("u", full=False, busy=0), "base")
    _updated(machine)
    assert machine.state == es.SERVING


@pytest.mark.parametrize("before", [es.SERVING, es.PAUSED, es.AWAKE_WEIGHTS, es.STALE])
def test_a_failure_before_the_first_byte_goes_back(before):
    machine = _serving()
    if before == es.PAUSED:
        machine.pause()
    elif before == es.AWAKE_WEIGHTS:
        machine.sleep(1, busy=0)
        machine.wake(weights=True, kv_cache=False)
    elif before == es.STALE:
        machine.go_stale("x")
    version = machine.version
    machine.begin_update("u", full=True, busy=0)
    machine.fail_update("u", "refused")
    assert machine.state == before and machine.version == version and machine.update_id == ""


def test_a_failure_after_the_first_byte_leaves_stale_until_a_full_update():
    machine = _serving()
    machine.begin_update("u", full=True, busy=0)
    machine.first_byte()
    machine.fail_update("u", "lost a chunk")
    assert machine.state == es.STALE and machine.version is None and "lost a chunk" in machine.reason
    status = machine.fill(pb.EngineStatus(version=_version(7)))
    assert status.state == pb.ENGINE_STATE_STALE and not status.HasField("version") and status.reason
    for call in (
        machine.pause,
        machine.resume,
        lambda: machine.sleep(1, busy=0),
        lambda: machine.wake(weights=True, kv_cache=True),
    ):
        _refused(call, "lost a chunk")
    _refused(lambda: machine.begin_update("d", full=False, busy=0), "base")
    _updated(machine, 2)
    assert machine.state == es.SERVING and machine.reason == "" and machine.version.number == 2


@pytest.mark.parametrize("action", ["update", "sleep"])
def test_memory_is_not_touched_while_a_step_runs(action):
    machine = _serving()
    machine.pause()
    call = {
        "update": lambda busy: machine.begin_update("u", full=True, busy=busy),
        "sleep": lambda busy: machine.sleep(2, busy=busy),
    }
    _refused(lambda: call[action](1), "1 engine steps are running")
    assert machine.state == es.PAUSED and machine.version is not None
    call[action](0)


def test_sleep_and_wake():
    machine = _serving()
    machine.sleep(1, busy=0)
    assert (machine.state, machine.sleep_level, machine.version.number) == (es.ASLEEP, 1, 0)
    machine.sleep(1, busy=3)
    _refused(lambda: machine.sleep(2, busy=0))
    _refused(lambda: machine.wake(weights=False, kv_cache=True), "weights must be awake")
    _refused(lambda: machine.begin_update("u", full=True, busy=0))
    machine.wake(weights=True, kv_cache=False)
    assert machine.state == es.AWAKE_WEIGHTS and machine.admission is Admission.WAIT
    machine.wake(weights=True, kv_cache=False)
    machine.wake(weights=False, kv_cache=True)
    assert machine.state == es.SERVING


def test_level_two_needs_a_full_update_before_the_cache():
    machine = _serving()
    machine.sleep(2, busy=0)
    assert machine.version is None
    _refused(lambda: machine.wake(weights=True, kv_cache=True), "level 2")
    assert machine.state == es.ASLEEP, "a refused call changes nothing"
    machine.wake(weights=True, kv_cache=False)
    _refused(lambda: machine.wake(weights=False, kv_cache=True), "level 2")
    _updated(machine, 4)
    assert machine.state == es.AWAKE_WEIGHTS and machine.version.number == 4, "serves only once the cache is there"
    machine.wake(weights=False, kv_cache=True)
    assert machine.state == es.SERVING


def test_a_commit_may_stay_paused_also_while_asleep():
    machine = _serving()
    _updated(machine, stay_paused=True)
    assert machine.state == es.PAUSED
    machine.sleep(1, busy=0)
    machine.wake(weights=True, kv_cache=False)
    _updated(machine, 2, stay_paused=True)
    machine.wake(weights=False, kv_cache=True)
    assert machine.state == es.PAUSED


def test_one_update_at_a_time_and_by_its_name():
    machine = _serving()
    machine.begin_update("u", full=True, busy=0)
    _refused(lambda: machine.begin_update("v", full=True, busy=0), "'u' is open")
    for call in (
        lambda: machine.commit_update("v", _version(1)),
        lambda: machine.fail_update("v", "x"),
        machine.resume,
    ):
        _refused(call)
    assert machine.update_id == "u"


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.check_sleep(3),
        lambda m: m.wake(weights=False, kv_cache=False),
        lambda m: m.check_begin_update("", full=True),
    ],
)
def test_values_that_no_state_takes(call):
    with pytest.raises(ContractError):
        call(_serving())


def test_a_commit_needs_a_whole_version():
    machine = _serving()
    machine.begin_update("u", full=True, busy=0)
    half = _version(1)
    half.ClearField("lineage")
    with pytest.raises(ContractError, match="version"):
        machine.commit_update("u", half)
    assert machine.state == es.RECEIVING


def test_the_version_handed_out_is_a_copy():
    machine = _serving()
    machine.version.number = 9
    assert machine.version.number == 0


class AnyOrder(RuleBasedStateMachine):
    """Calls in any order: each is whole or refused, and the version never lies."""

    @initialize()
    def start(self):
        self.machine = _serving()
        self.number = 0
        self.trusted = 0
        self.touched = False
        self.lost = False

    def _try(self, call) -> bool:
        before = (self.machine.state, self.machine.version, self.machine.update_id, self.machine.sleep_level)
        try:
            call()
        except (StatusError, ContractError):
            assert before == (
                self.machine.state,
                self.machine.version,
                self.machine.update_id,
                self.machine.sleep_level,
            )
            return False
        return True

    @rule()
    def pause(self):
        self._try(self.machine.pause)

    @rule()
    def resume(self):
        self._try(self.machine.resume)

    @rule(level=st.integers(0, 3), busy=st.integers(0, 1))
    def sleep(self, level, busy):
        was = self.machine.state
        if self._try(lambda: self.machine.sleep(level, busy=busy)):
            assert not busy or was == es.ASLEEP
            if level == 2:
                self.trusted, self.lost = None, True

    @rule(weights=st.booleans(), kv_cache=st.booleans())
    def wake(self, weights, kv_cache):
        self._try(lambda: self.machine.wake(weights=weights, kv_cache=kv_cache))

    @rule(full=st.booleans(), busy=st.integers(0, 1))
    def begin(self, full, busy):
        if self._try(lambda: self.machine.begin_update("u", full=full, busy=busy)):
            assert not busy and (full or self.trusted is not None)
            self.touched = False

    @rule()
    def load(self):
        if self._try(self.machine.first_byte):
            self.touched = True

    @rule(stay=st.booleans())
    def commit(self, stay):
        if self._try(lambda: self.machine.commit_update("u", _version(self.number + 1), stay_paused=stay)):
            self.number += 1
            self.trusted, self.lost = self.number, False

    @rule()
    def fail(self):
        if self._try(lambda: self.machine.fail_update("u", "x")) and self.touched:
            assert self.machine.state == es.STALE
            self.trusted = None

    @rule()
    def stale(self):
        if self._try(lambda: self.machine.go_stale("x")):
            self.trusted = None

    @invariant()
    def the_version_never_lies(self):
        held = self.machine.version
        assert (held.number if held is not None else None) == self.trusted

    @invariant()
    def who_serves_has_weights(self):
        if self.machine.admission is Admission.RUN:
            assert self.trusted is not None and not self.lost
        assert (self.machine.state == es.RECEIVING) == bool(self.machine.update_id)
        assert (self.machine.state == es.ASLEEP) == bool(self.machine.sleep_level)


TestAnyOrder = AnyOrder.TestCase
