"""What is derived from a sample."""

import numpy as np

from vime_proto import sample_views as views
from vime_proto.fakes import build
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_tensor
from vime_proto.version import policy_version


def _version(number: int, lineage: int = 0):
    return policy_version("run", lineage, number)


def _sample() -> pb.Sample:
    tool = pb.Segment(role=pb.SEGMENT_ROLE_TOOL, token_ids=build.ids([9]))
    last = build.model_segment(_version(5), [7, 8, 6], [-1.0, -2.0, -3.0])
    last.trainable_mask.CopyFrom(to_tensor(np.array([True, False, True])))
    last.generation.sampling.temperature = 0.5
    return pb.Sample(
        sample_id="s", segments=[build.prompt_segment([1, 2]), build.model_segment(_version(3), [0, 4]), tool, last]
    )


def test_everything_is_aligned_to_the_tokens():
    sample = _sample()
    np.testing.assert_array_equal(views.token_ids(sample), [1, 2, 0, 4, 9, 7, 8, 6])
    np.testing.assert_array_equal(views.trainable_mask(sample), [0, 0, 1, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(views.generated_mask(sample), [0, 0, 1, 1, 0, 1, 1, 1])
    np.testing.assert_array_equal(views.version_numbers(sample), [-1, -1, 3, 3, -1, 5, 5, 5])
    nan = np.nan
    np.testing.assert_array_equal(views.logprobs(sample), np.float32([nan, nan, 0.0, -0.5, nan, -1, -2, -3]))
    np.testing.assert_array_equal(views.temperatures(sample), np.float32([1, 1, 1, 1, 1, 0.5, 0.5, 0.5]))
    assert np.isnan(views.teacher_logprobs(sample)).all()
    assert views.sample_length(sample) == 8 and views.trainable_tokens(sample) == 4
    for array, dtype in (
        (views.token_ids(sample), np.int32),
        (views.trainable_mask(sample), np.bool_),
        (views.logprobs(sample), np.float32),
        (views.version_numbers(sample), np.int64),
    ):
        assert array.dtype == dtype and array.shape == (8,)


def test_a_stored_prefix_is_what_was_sampled():
    sample = _sample()
    restored = pb.Sample.FromString(sample.SerializeToString())
    assert views.token_ids(restored)[:4].tobytes() == np.int32([1, 2, 0, 4]).tobytes()


def test_an_empty_sample_has_empty_views():
    empty = pb.Sample(sample_id="s")
    for view in (views.token_ids, views.trainable_mask, views.logprobs, views.version_numbers):
        assert view(empty).shape == (0,)
    assert views.oldest_version(empty) is None and views.staleness(empty, 3) is None


def test_age_is_that_of_the_oldest_segment_and_the_mean_weighs_tokens():
    segments = [
        build.prompt_segment(),
        *(build.model_segment(_version(v), [1] * n) for v, n in ((3, 1), (5, 2), (7, 5))),
    ]
    sample = pb.Sample(sample_id="s", segments=segments)
    assert views.oldest_version(sample) == _version(3)
    assert views.staleness(sample, 8) == (5, (5 * 1 + 3 * 2 + 1 * 5) / 8)


def test_a_response_aborted_before_its_first_token_still_has_a_version():
    sample = pb.Sample(sample_id="s", segments=[build.prompt_segment(), build.model_segment(_version(0), [], [])])
    assert views.segment_versions(sample) == [(_version(0), 0)]
    assert views.oldest_version(sample) == _version(0)
    assert views.staleness(sample, 2) == (2, 2.0)


def test_neighbours_of_one_version_are_joined():
    segments = [build.prompt_segment(), *(build.model_segment(_version(v), [1, 2]) for v in (1, 1, 2))]
    assert [(v.number, n) for v, n in views.segment_versions(pb.Sample(segments=segments))] == [(1, 4), (2, 2)]


def test_an_older_lineage_is_older_whatever_its_number():
    first, second = (build.sample(name, version) for name, version in (("a", _version(9, 0)), ("b", _version(2, 1))))
    assert views.oldest_version(first, second) == _version(9, 0)


def test_given_text_has_no_versions():
    text = pb.Segment(role=pb.SEGMENT_ROLE_MODEL, token_ids=build.ids([5]), trainable_all=True)
    sample = pb.Sample(segments=[build.prompt_segment(), text])
    assert views.oldest_version(sample) is None and views.trainable_tokens(sample) == 1


def test_a_group_yields_the_samples_of_every_rollout():
    group = pb.Group()
    group.rollouts.add(samples=[pb.Sample(sample_id="a"), pb.Sample(sample_id="b")])
    group.rollouts.add()
    group.rollouts.add(samples=[pb.Sample(sample_id="c")])
    assert [sample.sample_id for sample in views.group_samples(group)] == ["a", "b", "c"]


def test_a_groups_index_counts_what_its_samples_hold():
    sample = _sample()
    group = pb.Group(group_id="g", prompt=pb.Prompt(text="t"))
    group.rollouts.add(rollout_id="r0", attempt=2, status=pb.ROLLOUT_STATUS_COMPLETED, reward=0.0, samples=[sample])
    group.rollouts.add(rollout_id="r1", attempt=1, status=pb.ROLLOUT_STATUS_FAILED, reliable=False)
    index = views.group_index(group)
    assert (index.group_id, index.prompt_id, index.attempt) == ("g", "g", 2)
    first, second = index.rollouts
    assert first.HasField("reward") and first.reward == 0.0 and first.reliable
    assert not second.HasField("reward") and not second.reliable and not second.samples
    entry = first.samples[0]
    assert (entry.tokens, entry.trainable_tokens, entry.bytes) == (8, 4, sample.ByteSize())
    assert [(one.version.number, one.tokens) for one in entry.versions] == [(3, 2), (5, 3)]
