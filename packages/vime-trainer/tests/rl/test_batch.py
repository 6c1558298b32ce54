"""Reading, planning and laying out a batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make import answer, floats, group, index_of, prompt, rollout, sample, samples_of, tool

from vime_proto.errors import ContractError
from vime_proto.sample.v1 import sample_pb2
from vime_trainer import batch
from vime_trainer.batch import (
    RefusedSamplesError,
    UnsupportedSamplingError,
    build_micro_batch,
    plan_micro_batches,
    read_columns,
    split_groups,
)


def test_public_names():
    assert sorted(batch.__all__) == [
        "BatchIndex",
        "BatchSettings",
        "Columns",
        "MicroBatch",
        "RefusedSamplesError",
        "TokenCost",
        "UnsupportedSamplingError",
        "build_micro_batch",
        "index_group",
        "plan_micro_batches",
        "plan_shares",
        "plan_step",
        "read_columns",
        "share_samples",
        "split_groups",
    ]


def columns_of(groups):
    return read_columns(index_of(groups), samples_of(groups))


def two_rollouts(first, second=None):
    second = second or sample("b", prompt(), answer([3]))
    return [group("g", rollout("g.0", 1.0, first), rollout("g.1", 0.0, second))]


def test_index_says_what_may_be_trained():
    failed, unreliable = sample_pb2.ROLLOUT_STATUS_FAILED, sample("c", prompt(), answer([3, 4]))
    groups = [
        group(
            "g",
            rollout("r0", 1.0, sample("a", prompt(), answer([3])), sample("b", prompt(), answer([4, 5]))),
            rollout("r1", None, status=failed),
            rollout("r2", 1.0, unreliable, reliable=False),
            rollout("r3", 0.0, sample("d", prompt(), answer([6])), status=sample_pb2.ROLLOUT_STATUS_TRUNCATED),
        )
    ]
    index = index_of(groups)
    assert index.usable.tolist() == [True, False, False, True]
    assert index.failed.tolist() == [False, True, False, False]
    assert index.truncated.tolist() == [False, False, False, True]
    assert index.rewards.tolist()[::3] == [1.0, 0.0] and np.isnan(index.rewards[1])
    assert index.sample_rollouts.tolist() == [0, 0, 2, 3]
    assert index.lengths.tolist() == [3, 4, 4, 3]
    assert index.trainable.tolist() == [1, 2, 2, 1]


def test_zero_is_a_reward_and_absent_is_none():
    index = index_of([group("g", rollout("a", 0.0), rollout("b", None, status=sample_pb2.ROLLOUT_STATUS_FAILED))])
    assert index.rewards[0] == 0.0 and index.usable.tolist() == [True, False]


def test_staleness_is_token_weighted_and_the_oldest_segment_counts():
    mixed = sample("a", prompt(), answer([3] * 10, number=3), answer([4] * 4, number=5), answer([5] * 2, number=7))
    index = index_of(two_rollouts(mixed, sample("b", prompt(), answer([], number=0))))
    mean, oldest = index.staleness(8)
    assert oldest == 5
    assert mean == pytest.approx((10 * 5 + 4 * 3 + 2 * 1) / 16)


def test_staleness_of_nothing_is_absent():
    assert index_of([group("g", rollout("a", 0.0))]).staleness(3) is None


def test_columns_follow_segments():
    first = sample(
        "a",
        prompt([7, 8]),
        answer([3, 4], [-0.5, -0.25], temperature=0.7),
        tool([9]),
        answer([5], [-2.0], mask=[False]),
    )
    columns = columns_of(two_rollouts(first))
    here = columns.slice_of(0)
    assert columns.tokens[here].tolist() == [7, 8, 3, 4, 9, 5]
    assert columns.trainable[here].tolist() == [False, False, True, True, False, False]
    assert columns.engine_logprobs[here].tolist() == [0, 0, -0.5, -0.25, 0, -2.0]
    assert columns.temperature[here].tolist() == pytest.approx([1, 1, 0.7, 0.7, 1, 1])
    assert columns.slice_of(1) == slice(6, 9)


def test_teacher_and_versions_are_read_when_asked_for():
    taught = answer([3, 4], number=5)
    taught.generation.teacher_logprobs.CopyFrom(floats([-0.5, -2.0]))
    groups = two_rollouts(
        sample("a", prompt([7]), taught, answer([5], number=6, mask=[False])), sample("b", prompt([7]))
    )
    columns = read_columns(index_of(groups), samples_of(groups), teacher=True, versions=True)
    assert columns.teacher_logprobs.tolist() == [0, -0.5, -2.0, 0, 0]
    assert columns.versions.tolist() == [-1, 5, 5, 6, -1]
    plain = columns_of(groups)
    assert plain.teacher_logprobs is None and plain.versions is None


def test_a_missing_teacher_is_named():
    groups = two_rollouts(sample("a", prompt(), answer([])))
    with pytest.raises(RefusedSamplesError, match=r"sample 'b': .*teacher_logprobs.*missing"):
        read_columns(index_of(groups), samples_of(groups), teacher=True)


def test_empty_responses_have_no_trainable_tokens():
    columns = columns_of(two_rollouts(sample("a", prompt(), answer([]))))
    assert columns.trainable.tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_logprob_that_is_not_finite_refuses_the_sample_by_name(bad):
    groups = two_rollouts(sample("a", prompt(), answer([3, 4])))
    spoilt = {**samples_of(groups), "a": sample("a", prompt(), answer([3, 4], [-1.0, bad]))}
    with pytest.raises(
        RefusedSamplesError, match="sample 'a': .*position 1 of 2.*requests: request-0 of engine-0"
    ) as refusal:
        read_columns(index_of(groups), spoilt)
    assert list(refusal.value.refused) == ["a"]


def test_missing_logprobs_are_named():
    segment = answer([3])
    segment.generation.ClearField("logprobs")
    good = two_rollouts(sample("a", prompt(), answer([3])))
    with pytest.raises(RefusedSamplesError, match=r"sample 'a': .*logprobs"):
        read_columns(index_of(good), {**samples_of(good), "a": sample("a", prompt(), segment)})


def test_a_missing_or_drifted_sample_is_named():
    groups = two_rollouts(sample("a", prompt(), answer([3, 4])))
    index, samples = index_of(groups), samples_of(groups)
    with pytest.raises(RefusedSamplesError, match="sample 'b': .*not delivered"):
        read_columns(index, {"a": samples["a"]})
    with pytest.raises(RefusedSamplesError, match="3 tokens, but the index says 4"):
        read_columns(index, {**samples, "a": sample("a", prompt(), answer([3]))})
    with pytest.raises(RefusedSamplesError, match="1 trainable tokens, but the index says 2"):
        read_columns(index, {**samples, "a": sample("a", prompt(), answer([3, 4], mask=[True, False]))})


def test_token_ids_outside_the_vocabulary_are_refused():
    groups = two_rollouts(sample("a", prompt(), answer([99])))
    with pytest.raises(RefusedSamplesError, match="sample 'a'"):
        read_columns(index_of(groups), samples_of(groups), vocab_size=16)


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (answer([3], mode=sample_pb2.LOGPROB_MODE_RAW, temperature=0.7), "RAW log-probs at temperature 0.7"),
        (answer([3], repetition_penalty=1.2), "sampling.repetition_penalty"),
        (answer([3], presence_penalty=0.5), "sampling.presence_penalty"),
        (answer([3], min_new_tokens=1), "sampling.min_new_tokens: 1 changes the distribution"),
    ],
)
def test_sampling_that_cannot_be_recomputed_is_refused(segment, message):
    with pytest.raises(UnsupportedSamplingError, match=message):
        columns_of(two_rollouts(sample("a", prompt(), segment)))


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_truncated_sampling_is_refused(truncation):
    segment = answer([3], **truncation)
    segment.generation.kept_token_ids.values.CopyFrom(prompt([3]).token_ids)
    from vime_proto.tensor import to_tensor

    segment.generation.kept_token_ids.offsets.CopyFrom(to_tensor(np.array([0, 1], np.uint64)))
    with pytest.raises(UnsupportedSamplingError, match=r"top_p, top_k, min_p.*sample 'a'"):
        columns_of(two_rollouts(sample("a", prompt(), segment)))


def test_raw_logprobs_at_temperature_one_are_fine():
    columns_of(two_rollouts(sample("a", prompt(), answer([3], mode=sample_pb2.LOGPROB_MODE_RAW))))


def test_a_sample_twice_in_a_batch_is_refused():
    with pytest.raises(ContractError, match="'a' occurs twice"):
        index_of([group(f"g{i}", rollout(f"r{i}", 1.0, sample("a", prompt(), answer([3])))) for i in range(2)])


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60), st.sampled_from(["packed", "padded"]))
def test_every_sample_is_planned_once_and_fits(lengths, budget, layout):
    plan = plan_micro_batches(lengths, range(len(lengths)), budget, layout)
    assert sorted(s for one in plan for s in one) == list(range(len(lengths)))
    for one in plan:
        width = [lengths[s] for s in one]
        total = max(width) * len(width) if layout == "padded" else sum(width)
        assert total <= budget or len(one) == 1


def test_optimizer_steps_take_whole_groups_once():
    groups = np.repeat(np.arange(5), 3)
    parts = split_groups(groups, 2)
    assert np.stack(parts).sum(0).tolist() == [1] * 15
    for part in parts:
        assert all(len(set(part[groups == g])) == 1 for g in range(5))
    assert len(split_groups(groups, 9)) == 5
    assert len(split_groups(np.zeros(0, np.int64), 2)) == 1


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=6))
def test_micro_batch_holds_the_samples_tokens(lengths):
    rollouts = [
        rollout(f"r{i}", 1.0, sample(f"s{i}", prompt([1, 2]), answer([i + 3] * n))) for i, n in enumerate(lengths)
    ]
    columns = columns_of([group("g", *rollouts)])
    chosen = list(range(0, len(lengths), 2))
    micro = build_micro_batch(columns, chosen, columns.trainable, {"engine": columns.engine_logprobs})
    for place, s in enumerate(chosen):
        low, high = micro.batch.cu_seqlens[place : place + 2].tolist()
        assert high - low == columns.lengths[s]
        assert micro.batch.tokens[low:high].tolist() == columns.tokens[columns.slice_of(s)].tolist()
        assert micro.batch.positions[low:high].tolist() == list(range(high - low))
        assert micro.streams.mask[low:high].tolist() == [False, False, *[True] * lengths[s]]
        assert micro.streams["engine"][low:high].tolist() == [0, 0, *[-1.0] * lengths[s]]
