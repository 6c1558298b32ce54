"""Opening and closing runs, prompts, counters."""

from __future__ import annotations

import pytest

from vime_proto.buffer.v1 import buffer_pb2 as pb
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.conformance._calls import ABORTED, INVALID, NOT_FOUND, PRECONDITION, new_id, refused
from vime_proto.fakes import build
from vime_proto.sample.v1 import sample_pb2


def test_a_new_run_starts_at_zero_with_no_version(buffer):
    first = buffer.open()
    assert not first.existed
    assert first.HasField("trained") and first.trained == 0
    assert not first.HasField("version"), "absent before the first publication, not number 0"
    assert first.lineage == common.Lineage(ordinal=0)


def test_an_open_run_is_taken_up(buffer):
    buffer.ready("a")
    again = buffer.open()
    assert again.existed
    assert again.version == buffer.version(0), "number 0 must be present once it is published"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"batch_groups": 0}, "batch_groups"),
        ({"group_size": 0}, "group_size"),
        ({"publish_interval": 3, "max_staleness": 1}, "max_staleness"),
        ({"lineage": None}, "lineage"),
    ],
)
def test_a_run_that_could_not_go_on_is_refused(buffer, settings, field):
    with refused(INVALID, field=field):
        buffer.open(**settings)
    with refused(NOT_FOUND, names=buffer.run_id):
        buffer.stats()


@pytest.mark.parametrize(("interval", "staleness"), [(1, 0), (2, 1), (5, 4), (5, 9)])
def test_publishing_every_n_batches_needs_a_staleness_of_n_less_one(buffer, interval, staleness):
    assert not buffer.open(publish_interval=interval, max_staleness=staleness).existed


def test_other_settings_under_a_known_run_are_refused(buffer):
    buffer.open(group_size=2)
    with refused(PRECONDITION, INVALID, names="group_size"):
        buffer.open(group_size=3)


def test_an_unknown_run_is_named(buffer):
    with refused(NOT_FOUND, names=buffer.run_id):
        buffer.lease()
    with refused(NOT_FOUND, names=buffer.run_id):
        buffer.batch()


def test_a_closed_run_answers_end_of_data(buffer):
    buffer.ready("a", "b")
    buffer.call("CloseRun", pb.CloseRunRequest, reason="finished")
    assert buffer.lease().outcome == pb.LEASE_OUTCOME_END_OF_DATA
    assert buffer.batch().outcome == pb.LEASE_OUTCOME_END_OF_DATA
    assert buffer.stats().closed


def test_prompts_report_per_item_and_the_good_ones_stay(buffer):
    buffer.open(batch_groups=4)
    prompts = [build.prompt("good"), sample_pb2.Prompt(prompt_id="no-input"), build.prompt("also-good", [0])]
    answer = buffer.call("PutPrompts", pb.PutPromptsRequest, prompts=prompts)
    assert [status.code for status in answer.statuses] == [0, 3, 0]
    assert "no-input" in answer.statuses[1].message
    buffer.publish(0)
    assert {lease.prompt.prompt_id for lease in buffer.lease().leases} == {"good", "also-good"}


def test_the_same_prompt_again_changes_nothing_and_another_content_is_refused(buffer):
    buffer.open(batch_groups=4)
    buffer.put("a")
    assert buffer.put("a").statuses[0].code == 0
    other = buffer.call("PutPrompts", pb.PutPromptsRequest, prompts=[build.prompt("a", [7])])
    assert other.statuses[0].code != 0 and "a" in other.statuses[0].message
    buffer.publish(0)
    assert len(buffer.lease().leases) == 1


def test_a_prompt_arrives_unchanged(buffer):
    buffer.open()
    given = build.prompt("p", [0, 5], answer="", reward="exact", record_json='{"x": 0}', dataset="d", row=0, epoch=0)
    buffer.call("PutPrompts", pb.PutPromptsRequest, prompts=[given])
    buffer.publish(0)
    got = buffer.lease_one().prompt
    assert got == given
    assert got.HasField("answer") and got.HasField("row"), "an empty answer and row 0 are values"


def test_a_version_above_the_acked_batches_is_refused(buffer):
    buffer.open()
    with refused(INVALID, PRECONDITION):
        buffer.publish(1)
    assert not buffer.stats().HasField("version")


def test_a_version_without_number_is_refused(buffer):
    buffer.open()
    with refused(INVALID, field="version.number"):
        version = common.PolicyVersion(run_id=buffer.run_id, lineage=0)
        buffer.call("PublishVersion", pb.PublishVersionRequest, version=version)


def test_a_version_of_another_lineage_is_refused(buffer):
    buffer.open()
    with refused(ABORTED, INVALID, PRECONDITION):
        buffer.publish(0, lineage=1)


def test_stats_count_what_is_under_way(buffer):
    buffer.ready("a", "b", "c", batch_groups=3, epochs=1)
    one, _ = buffer.lease(2).leases
    buffer.commit(one)
    stats = buffer.stats()
    assert (stats.prompts_leased, stats.groups_ready, stats.groups_batch_leased) == (1, 1, 0)
    assert stats.capacity == 1
    assert stats.HasField("version") and stats.version == 0
    assert stats.groups_committed_total == 1


def test_an_empty_request_id_is_refused(buffer):
    with refused(INVALID, field="request_id"):
        buffer.stub.CloseRun(pb.CloseRunRequest(run_id=buffer.run_id), timeout=buffer.timeout)


def test_ids_of_requests_belong_to_one_payload(buffer):
    buffer.open(batch_groups=4)
    request_id = new_id()
    buffer.call("PutPrompts", pb.PutPromptsRequest, request_id=request_id, prompts=[build.prompt("a")])
    with refused(INVALID, names=request_id):
        buffer.call("PutPrompts", pb.PutPromptsRequest, request_id=request_id, prompts=[build.prompt("b")])
    buffer.publish(0)
    assert len(buffer.lease().leases) == 1
