"""Samples, rollouts, groups and prompts at the boundary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_proto.buffer.v1 import buffer_pb2
from vime_proto.errors import ContractError
from vime_proto.fakes import build
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_tensor
from vime_proto.validate import truncates, validate_group, validate_prompt, validate_sample, validate_sampling
from vime_proto.version import policy_version

VERSION = policy_version("run", 0, 0)


def _refused(call, field: str, names: str = ""):
    with pytest.raises(ContractError) as caught:
        call()
    paths = [path for path, _ in caught.value.violations]
    assert any(field in path for path in paths), paths
    assert names in str(caught.value)


def test_a_whole_sample_passes():
    validate_sample(build.sample("s", VERSION))


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
def test_lengths_must_agree(ids, logprobs, mask):
    segment = build.model_segment(VERSION, [2] * ids, [-0.5] * logprobs)
    segment.trainable_mask.CopyFrom(to_tensor(np.ones(mask, bool)))
    sample = pb.Sample(sample_id="s-1", segments=[build.prompt_segment(), segment])
    if ids == logprobs == mask:
        validate_sample(sample)
    else:
        _refused(lambda: validate_sample(sample), "segments[1]", "s-1")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["logprobs", "teacher_logprobs"])
def test_a_log_prob_that_is_no_number_is_refused_with_its_place(value, name):
    sample = build.sample("s-1", VERSION)
    getattr(sample.segments[1].generation, name).CopyFrom(build.floats([-0.5, value]))
    _refused(lambda: validate_sample(sample), f"generation.{name}", "position 1 of 2")
    _refused(lambda: validate_sample(sample), f"generation.{name}", "s-1")


def test_a_positive_log_prob_is_refused_but_rounding_is_not():
    sample = build.sample("s", VERSION)
    sample.segments[1].generation.logprobs.CopyFrom(build.floats([1e-6, 0.0]))
    validate_sample(sample)
    sample.segments[1].generation.logprobs.CopyFrom(build.floats([0.5, 0.0]))
    _refused(lambda: validate_sample(sample), "logprobs", "above 0")


def test_one_log_prob_more_than_ids_is_refused():
    sample = build.sample("s", VERSION)
    sample.segments[1].generation.logprobs.CopyFrom(build.floats([-1.0, -1.0, -1.0]))
    _refused(lambda: validate_sample(sample), "logprobs.shape", "must be [2], got [3]")


@pytest.mark.parametrize("name", ["logprobs", "version", "logprob_mode", "sampling"])
def test_rl_needs_what_given_text_does_not(name):
    sample = build.sample("s", VERSION)
    sample.segments[1].generation.ClearField(name)
    _refused(lambda: validate_sample(sample), f"generation.{name}", "'s'")
    validate_sample(sample, rl=False)


def test_given_text_has_no_generation():
    text = pb.Segment(role=pb.SEGMENT_ROLE_MODEL, token_ids=build.ids([5, 6]), trainable_all=True)
    sample = pb.Sample(sample_id="s", segments=[build.prompt_segment(), text])
    validate_sample(sample, rl=False)
    _refused(lambda: validate_sample(sample), "segments[1].generation")


def test_tool_tokens_cannot_be_trained_by_rl():
    tool = pb.Segment(role=pb.SEGMENT_ROLE_TOOL, token_ids=build.ids([5]), trainable_all=True)
    sample = pb.Sample(sample_id="s", segments=[build.prompt_segment(), build.model_segment(VERSION), tool])
    _refused(lambda: validate_sample(sample), "segments[2].trainable")
    tool.trainable_all = False
    sample.segments[2].CopyFrom(tool)
    validate_sample(sample)


@pytest.mark.parametrize("tokens", [[], [1]])
def test_empty_and_one_token_responses_are_defined(tokens):
    segment = build.model_segment(VERSION, tokens)
    validate_sample(pb.Sample(sample_id="s", segments=[build.prompt_segment([0]), segment]))


def test_a_mask_of_zeros_is_defined():
    segment = build.model_segment(VERSION)
    segment.trainable_mask.CopyFrom(to_tensor(np.zeros(2, bool)))
    validate_sample(pb.Sample(sample_id="s", segments=[build.prompt_segment(), segment]))


def test_a_mask_byte_other_than_zero_and_one_is_refused():
    sample = build.sample("s", VERSION)
    sample.segments[1].trainable_mask.CopyFrom(to_tensor(np.ones(2, bool)))
    sample.segments[1].trainable_mask.data = b"\x02\x01"
    _refused(lambda: validate_sample(sample), "trainable_mask", "0 or 1")


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda s: s.ClearField("sample_id"), "sample_id"),
        (lambda s: s.ClearField("segments"), "segments"),
        (lambda s: s.segments.reverse(), "segments[0].role"),
        (lambda s: setattr(s.segments[0], "role", 0), "segments[0].role"),
        (lambda s: s.segments[0].token_ids.CopyFrom(build.ids([])), "segments[0].token_ids"),
        (lambda s: s.segments[0].ClearField("token_ids"), "segments[0].token_ids"),
        (lambda s: s.segments[1].token_ids.CopyFrom(build.ids([-1, 2])), "segments[1].token_ids"),
        (lambda s: s.segments[1].token_ids.CopyFrom(to_tensor(np.zeros(2, np.int64))), "token_ids.dtype"),
        (lambda s: s.segments[0].generation.SetInParent(), "segments[0].generation"),
        (lambda s: setattr(s.segments[1], "reward", float("nan")), "segments[1].reward"),
        (lambda s: s.segments[1].streams["x"].CopyFrom(build.floats([1.0])), "streams['x']"),
        (lambda s: s.segments[1].generation.version.ClearField("number"), "version.number"),
        (lambda s: setattr(s.segments[1].generation.sampling, "temperature", 0.0), "sampling.temperature"),
    ],
)
def test_what_is_wrong_is_named(spoil, field):
    sample = build.sample("s", VERSION)
    spoil(sample)
    _refused(lambda: validate_sample(sample), field)


def test_ids_beyond_the_vocabulary_are_refused_with_their_place():
    sample = build.sample("s", VERSION, tokens=(0, 40))
    validate_sample(sample)
    _refused(lambda: validate_sample(sample, vocab_size=40), "token_ids", "position 1 holds 40")


def test_truncated_sampling_needs_its_kept_set_where_it_is_asked_for():
    sample = build.sample("s", VERSION)
    sample.segments[1].generation.sampling.top_k = 2
    validate_sample(sample)
    _refused(lambda: validate_sample(sample, need_kept_set=True), "kept_token_ids")
    kept = sample.segments[1].generation.kept_token_ids
    kept.values.CopyFrom(build.ids([0, 1, 4]))
    kept.offsets.CopyFrom(to_tensor(np.array([0, 2, 3], np.uint64)))
    validate_sample(sample, need_kept_set=True)
    kept.offsets.CopyFrom(to_tensor(np.array([0, 2, 4], np.uint64)))
    _refused(lambda: validate_sample(sample, need_kept_set=True), "kept_token_ids.offsets")


def test_alternatives_may_be_impossible_but_not_nan():
    sample = build.sample("s", VERSION)
    top = sample.segments[1].generation.top_logprobs
    top.token_ids.CopyFrom(to_tensor(np.array([[0, 1], [4, 2]], np.int32)))
    top.logprobs.CopyFrom(to_tensor(np.array([[0, -np.inf], [-0.5, -1]], np.float32)))
    validate_sample(sample)
    top.logprobs.CopyFrom(to_tensor(np.array([[0, np.nan], [-0.5, -1]], np.float32)))
    _refused(lambda: validate_sample(sample), "top_logprobs.logprobs")


@pytest.mark.parametrize(
    ("fields", "bad"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop": [""]}, "stop[0]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
    ],
)
def test_sampling_parameters_have_ranges(fields, bad):
    _refused(lambda: validate_sampling(build.sampling(**fields)), bad)


def test_greedy_is_for_evaluation_and_negative_never():
    validate_sampling(build.sampling(temperature=0.0), evaluation=True)
    _refused(lambda: validate_sampling(build.sampling(temperature=-0.5), evaluation=True), "temperature")


def test_only_an_override_may_leave_the_limit_out():
    validate_sampling(pb.SamplingParams(temperature=0.5), override=True)
    _refused(lambda: validate_sampling(pb.SamplingParams(temperature=0.5)), "max_new_tokens")


def test_what_truncates():
    off = [{}, {"top_p": 1.0}, {"top_k": 0}, {"min_p": 0.0}]
    assert not any(truncates(pb.SamplingParams(**one)) for one in off)
    assert all(truncates(pb.SamplingParams(**one)) for one in ({"top_p": 0.9}, {"top_k": 1}, {"min_p": 0.1}))


def _group(size: int = 2) -> pb.Group:
    lease = buffer_pb2.PromptLease(prompt=build.prompt("p"), attempt=1, group_size=size)
    return build.group(lease, VERSION)


def test_a_whole_group_passes():
    validate_group(_group(), group_size=2)


def test_a_failed_rollout_counts_and_needs_no_reward():
    group = _group()
    lease = buffer_pb2.PromptLease(prompt=group.prompt, attempt=1, group_size=2)
    group.rollouts[1].CopyFrom(build.failed_group(lease).rollouts[1])
    validate_group(group, group_size=2)


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda g: g.rollouts.pop(), "rollouts"),
        (lambda g: setattr(g, "group_id", "x"), "group_id"),
        (lambda g: g.ClearField("prompt"), "prompt"),
        (lambda g: setattr(g.rollouts[1], "rollout_id", g.rollouts[0].rollout_id), "rollouts[1].rollout_id"),
        (lambda g: g.rollouts[1].samples[0].CopyFrom(g.rollouts[0].samples[0]), "sample_id"),
        (lambda g: g.rollouts[0].ClearField("status"), "rollouts[0].status"),
        (lambda g: g.rollouts[0].ClearField("reward"), "rollouts[0].reward"),
        (lambda g: setattr(g.rollouts[0], "reward", float("inf")), "rollouts[0].reward"),
        (lambda g: g.rollouts[0].rewards.update({"x": float("nan")}), "rollouts[0].rewards['x']"),
        (lambda g: g.rollouts[0].failure.SetInParent(), "rollouts[0].failure"),
        (lambda g: setattr(g.rollouts[1], "status", pb.ROLLOUT_STATUS_FAILED), "rollouts[1].failure"),
    ],
)
def test_a_spoilt_group_is_refused_by_name(spoil, field):
    group = _group()
    spoil(group)
    _refused(lambda: validate_group(group, group_size=2), field)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (pb.Prompt(text="x"), "prompt_id"),
        (pb.Prompt(prompt_id="p"), "input"),
        (pb.Prompt(prompt_id="p", text=""), "text"),
        (pb.Prompt(prompt_id="p", messages_json="{}"), "messages_json"),
        (pb.Prompt(prompt_id="p", messages_json="[]"), "messages_json"),
        (pb.Prompt(prompt_id="p", messages_json="[1]"), "messages_json"),
        (pb.Prompt(prompt_id="p", messages_json="nope"), "messages_json"),
        (pb.Prompt(prompt_id="p", token_ids=build.ids([])), "token_ids"),
        (pb.Prompt(prompt_id="p", text="x", record_json="[]"), "record_json"),
        (pb.Prompt(prompt_id="p", text="x", sampling=pb.SamplingParams(top_p=2)), "sampling.top_p"),
    ],
)
def test_a_spoilt_prompt_is_refused_by_name(prompt, field):
    _refused(lambda: validate_prompt(prompt), field)


def test_every_way_to_ask_passes():
    for fields in (
        {"text": "2+2="},
        {"messages_json": '[{"role": "user", "content": "hi"}]'},
        {"token_ids": build.ids([0])},
    ):
        validate_prompt(pb.Prompt(prompt_id="p", record_json="{}", **fields))


def test_zeros_differ_from_unset_after_the_wire():
    group = _group()
    rollout = pb.Group.FromString(group.SerializeToString()).rollouts[0]
    assert rollout.HasField("reward") and rollout.reward == 0.0
    segment = rollout.samples[0].segments[1]
    assert segment.generation.version.HasField("number") and segment.generation.version.number == 0
    assert not pb.Rollout().HasField("reward") and not segment.HasField("reward")
