"""Requests of every service."""

import numpy as np
import pytest

from vime_proto import validate
from vime_proto.buffer.v1 import buffer_pb2 as buffer
from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.fakes import build
from vime_proto.rollout.v1 import rollout_pb2 as rollout
from vime_proto.router.v1 import router_pb2 as router
from vime_proto.sample.v1 import sample_pb2 as sample
from vime_proto.tensor import to_tensor
from vime_proto.version import policy_version

VERSION = policy_version("run", 0, 0)
IDS = {"request_id": "q", "run_id": "run"}
HOLDER = {"holder": "h", "incarnation": "1"}
LINEAGE = common.Lineage(ordinal=1, parent=0, forked_at=0)

VALID = [
    (
        validate.validate_open_run,
        buffer.OpenRunRequest(
            **IDS, batch_groups=1, group_size=1, max_staleness=0, publish_interval=1, lineage=common.Lineage(ordinal=0)
        ),
    ),
    (validate.validate_lease_prompts, buffer.LeasePromptsRequest(**IDS, **HOLDER, max_prompts=1)),
    (validate.validate_lease_batch, buffer.LeaseBatchRequest(**IDS, **HOLDER, wait_seconds=1.5)),
    (validate.validate_renew_leases, buffer.RenewLeasesRequest(run_id="run", lease_ids=["a"])),
    (validate.validate_put_prompts, buffer.PutPromptsRequest(**IDS, prompts=[build.prompt("p")])),
    (validate.validate_commit_group, buffer.CommitGroupRequest(**IDS, lease_id="l", attempt=1, group=sample.Group())),
    (validate.validate_release_lease, buffer.ReleaseLeaseRequest(**IDS, lease_id="l")),
    (
        validate.validate_fetch_samples,
        buffer.FetchSamplesRequest(
            run_id="run", samples=[buffer.SampleSelection(sample_id="s")], fields=[buffer.SAMPLE_FIELD_TOKENS]
        ),
    ),
    (validate.validate_batch_end, buffer.AckBatchRequest(**IDS, lease_id="l")),
    (validate.validate_batch_end, buffer.NackBatchRequest(**IDS, lease_id="l")),
    (validate.validate_publish_version, buffer.PublishVersionRequest(request_id="q", version=VERSION)),
    (validate.validate_report_checkpoint, buffer.ReportCheckpointRequest(**IDS, batch=0, oldest_restorable=0)),
    (validate.validate_rewind, buffer.RewindRequest(**IDS, batch=0, lineage=LINEAGE)),
    (
        validate.validate_start_evaluation,
        buffer.StartEvaluationRequest(**IDS, set="s", version=VERSION, sampling=sample.SamplingParams(temperature=0)),
    ),
    (validate.validate_register_engine, router.RegisterEngineRequest(request_id="q", engine_id="e", address="[::1]:5")),
    (validate.validate_engine_change, router.DrainEngineRequest(request_id="q", engine_id="e")),
    (validate.validate_minimum_version, router.SetMinimumVersionRequest(request_id="q", version=VERSION)),
    (validate.validate_minimum_version, router.SetMinimumVersionRequest(request_id="q")),
    (
        validate.validate_generate_request,
        rollout.GenerateRequest(request_id="q", prompt_token_ids=build.ids([0]), sampling=build.sampling()),
    ),
    (
        validate.validate_score_request,
        rollout.ScoreRequest(request_id="q", token_ids=build.ids([0, 1]), temperature=0.5),
    ),
]


@pytest.mark.parametrize(("check", "message"), VALID, ids=lambda value: getattr(value, "__name__", None))
def test_a_valid_request_passes(check, message):
    check(message)


@pytest.mark.parametrize(("check", "message"), VALID, ids=lambda value: getattr(value, "__name__", None))
def test_each_identity_is_required(check, message):
    for name in ("request_id", "run_id", "holder", "incarnation", "lease_id", "engine_id", "set"):
        if name not in message.DESCRIPTOR.fields_by_name:
            continue
        other = type(message)()
        other.CopyFrom(message)
        other.ClearField(name)
        with pytest.raises(ContractError) as caught:
            check(other)
        assert caught.value.violations[0][0] == name


SPOILT = [
    (buffer.OpenRunRequest, {"batch_groups": 0}, "batch_groups"),
    (buffer.OpenRunRequest, {"max_staleness": 1, "publish_interval": 3}, "max_staleness"),
    (buffer.OpenRunRequest, {"max_staleness": None}, "max_staleness"),
    (buffer.OpenRunRequest, {"max_attempts": 0}, "max_attempts"),
    (buffer.OpenRunRequest, {"epochs": 0}, "epochs"),
    (buffer.OpenRunRequest, {"lineage": None}, "lineage"),
    (buffer.OpenRunRequest, {"lineage": common.Lineage()}, "lineage.ordinal"),
    (buffer.OpenRunRequest, {"lineage": common.Lineage(ordinal=1, parent=1, forked_at=0)}, "lineage.parent"),
    (buffer.OpenRunRequest, {"lineage": common.Lineage(ordinal=1, parent=0)}, "lineage.forked_at"),
    (buffer.LeasePromptsRequest, {"max_prompts": 0}, "max_prompts"),
    (buffer.LeasePromptsRequest, {"wait_seconds": -1.0}, "wait_seconds"),
    (buffer.LeasePromptsRequest, {"wait_seconds": float("nan")}, "wait_seconds"),
    (buffer.PutPromptsRequest, {"prompts": None}, "prompts"),
    (buffer.CommitGroupRequest, {"attempt": 0}, "attempt"),
    (buffer.CommitGroupRequest, {"group": None}, "group"),
    (buffer.ReleaseLeaseRequest, {"partial": [sample.Rollout()]}, "partial[0].rollout_id"),
    (buffer.FetchSamplesRequest, {"fields": [0]}, "fields[0]"),
    (buffer.FetchSamplesRequest, {"routing_layers": common.IndexRange(start=2, stop=1)}, "routing_layers"),
    (buffer.PublishVersionRequest, {"version": policy_version("", 0, 0)}, "version.run_id"),
    (buffer.ReportCheckpointRequest, {"batch": None}, "batch"),
    (buffer.ReportCheckpointRequest, {"oldest_restorable": 1}, "oldest_restorable"),
    (buffer.RewindRequest, {"batch": None}, "batch"),
    (buffer.StartEvaluationRequest, {"version": policy_version("other", 0, 0)}, "version.run_id"),
    (buffer.StartEvaluationRequest, {"deadline_seconds": 0.0}, "deadline_seconds"),
    (router.RegisterEngineRequest, {"address": "::1:5"}, "address"),
    (router.RegisterEngineRequest, {"address": "host:0"}, "address"),
    (router.RegisterEngineRequest, {"lease_seconds": -1.0}, "lease_seconds"),
    (router.SetMinimumVersionRequest, {"version": common.PolicyVersion(run_id="r")}, "version.lineage"),
    (rollout.GenerateRequest, {"prompt_token_ids": build.ids([])}, "prompt_token_ids"),
    (rollout.GenerateRequest, {"sampling": None}, "sampling"),
    (rollout.GenerateRequest, {"sampling": sample.SamplingParams()}, "sampling.max_new_tokens"),
    (rollout.GenerateRequest, {"routing_start_row": 2}, "routing_start_row"),
    (rollout.GenerateRequest, {"minimum_version": common.PolicyVersion(run_id="r")}, "minimum_version.lineage"),
    (rollout.ScoreRequest, {"temperature": None}, "temperature"),
    (rollout.ScoreRequest, {"temperature": 0.0}, "temperature"),
    (rollout.ScoreRequest, {"token_ids": build.ids([0])}, "token_ids"),
    (rollout.ScoreRequest, {"start": 0}, "start"),
    (rollout.ScoreRequest, {"start": 2}, "start"),
]


@pytest.mark.parametrize(("kind", "change", "field"), SPOILT)
def test_what_is_wrong_is_named(kind, change, field):
    check, valid = next((check, message) for check, message in VALID if isinstance(message, kind))
    message = kind()
    message.CopyFrom(valid)
    for name, value in change.items():
        message.ClearField(name)
        if value is not None:
            message.MergeFrom(kind(**{name: value}))
    with pytest.raises(ContractError) as caught:
        check(message)
    assert caught.value.violations[0][0] == field


def test_limits_of_the_model_are_checked_where_they_are_known():
    request = rollout.GenerateRequest(request_id="q", prompt_token_ids=build.ids([0, 7]), sampling=build.sampling())
    validate.validate_generate_request(request, vocab_size=8, max_model_len=3)
    for limits in ({"vocab_size": 7}, {"max_model_len": 2}):
        with pytest.raises(ContractError, match="prompt_token_ids"):
            validate.validate_generate_request(request, **limits)


def test_an_engine_cannot_tell_evaluation_so_greedy_passes():
    request = rollout.GenerateRequest(
        request_id="q", prompt_token_ids=build.ids([0]), sampling=build.sampling(temperature=0.0)
    )
    validate.validate_generate_request(request)
    with pytest.raises(ContractError, match="temperature"):
        validate.validate_generate_request(request, evaluation=False)


@pytest.mark.parametrize(
    ("fields", "bad"),
    [
        ({"token_ids": build.ids([1]), "logprobs": build.floats([])}, "logprobs"),
        ({"token_ids": build.ids([1])}, "logprobs"),
        ({"token_ids": build.ids([1]), "logprobs": build.floats([np.nan])}, "logprobs"),
        ({"logprobs": build.floats([-1.0])}, "logprobs"),
        ({"version": None}, "version"),
        ({"stop_included": True}, "stop_included"),
        ({"stop_token_id": 0}, "stop_token_id"),
    ],
)
def test_a_bad_delta_is_named(fields, bad):
    response = rollout.GenerateResponse(**{"request_id": "q", "version": VERSION, **fields})
    with pytest.raises(ContractError, match=bad):
        validate.validate_generate_response(response)


def test_a_good_delta_passes():
    last = {"finish_reason": sample.FINISH_REASON_STOP, "stop_token_id": 0, "stop_included": True}
    for extra in ({}, {"token_ids": build.ids([0]), "logprobs": build.floats([0.0])}, last):
        validate.validate_generate_response(rollout.GenerateResponse(request_id="q", version=VERSION, **extra))


def test_a_score_has_one_value_per_token_scored():
    request = rollout.ScoreRequest(request_id="q", token_ids=build.ids([0, 1, 2, 3]), start=2, temperature=1.0)
    validate.validate_score_response(rollout.ScoreResponse(logprobs=build.floats([-1, -1]), version=VERSION), request)
    with pytest.raises(ContractError, match="logprobs"):
        validate.validate_score_response(rollout.ScoreResponse(logprobs=build.floats([-1]), version=VERSION), request)


def test_the_policy_for_requests_in_flight():
    assert validate.validate_in_flight(rollout.PauseRequest()) == rollout.IN_FLIGHT_POLICY_ABORT
    waiting = rollout.PauseRequest(in_flight=rollout.IN_FLIGHT_POLICY_WAIT)
    with pytest.raises(ContractError, match="wait_seconds"):
        validate.validate_in_flight(waiting)
    waiting.wait_seconds = 0.0
    assert validate.validate_in_flight(waiting) == rollout.IN_FLIGHT_POLICY_WAIT
    with pytest.raises(ContractError, match="in_flight"):
        validate.validate_in_flight(rollout.PauseRequest(in_flight=9))


def test_named_streams_have_a_row_per_token():
    validate.check_streams({"x": to_tensor(np.zeros((3, 2)))}, 3)
    with pytest.raises(ContractError, match="'x'"):
        validate.check_streams({"x": to_tensor(np.zeros(2))}, 3)
