"""What the configuration of an algorithm accepts and refuses."""

import pytest
from pydantic import ValidationError

from vime_trainer import algorithms
from vime_trainer.algorithms import AlgorithmSettings, check_correction, get_algorithm


def test_public_names():
    assert sorted(algorithms.__all__) == [
        "AGGREGATIONS",
        "ALGORITHMS",
        "Algorithm",
        "AlgorithmSettings",
        "CORRECTIONS",
        "GroupStatistics",
        "KlSettings",
        "Objective",
        "RolloutBatch",
        "Streams",
        "Terms",
        "centred",
        "check_correction",
        "clipped",
        "correction_weights",
        "get_algorithm",
        "group_statistics",
        "kl_terms",
        "log_ratio",
        "objective",
        "overlong_penalty",
        "token_clipped_loss",
        "token_weights",
    ]


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="unknown algorithm 'grop'; did you mean 'grpo'"):
        get_algorithm("grop")
    with pytest.raises(ValidationError, match="did you mean 'tis'"):
        AlgorithmSettings(correction="tiss")
    with pytest.raises(ValidationError, match="did you mean 'sequence'"):
        AlgorithmSettings(aggregation="sequences")
    with pytest.raises(ValidationError, match="unknown KL estimator 'k4'"):
        AlgorithmSettings(kl={"estimator": "k4"})
    with pytest.raises(ValidationError, match="clip_hihg"):
        AlgorithmSettings(clip_hihg=1)


def test_an_algorithm_by_import_path():
    assert get_algorithm("vime_trainer.algorithms.grpo:GRPO").name == "grpo"
    with pytest.raises(ValueError, match="cannot import 'nowhere:x'"):
        get_algorithm("nowhere:x")
    with pytest.raises(ValueError, match="is a function, not"):
        get_algorithm("vime_trainer.algorithms.grpo:advantage")


def test_algorithms_bring_their_own_defaults():
    assert AlgorithmSettings().aggregation == "sequence"
    assert AlgorithmSettings(name="rloo").aggregation == "token"
    assert AlgorithmSettings(name="gspo").clip_high == 4e-4
    assert AlgorithmSettings(name="gspo", clip_high=0.1).clip_high == 0.1
    assert AlgorithmSettings(old_policy="engine").correction == "none"
    with pytest.raises(ValidationError, match="constant_length"):
        AlgorithmSettings(name="dr_grpo")


@pytest.mark.parametrize("name", sorted(algorithms.ALGORITHMS))
@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize(
    ("old_policy", "correction", "refused"),
    [
        ("trainer", "tis", None),
        ("trainer", "icepop", None),
        ("trainer", "none", "stale"),
        ("engine", "none", None),
        ("engine", "tis", "twice"),
    ],
)
def test_which_losses_are_legal(name, staleness, old_policy, correction, refused):
    extra = {"constant_length": 8} if name == "dr_grpo" else {}
    settings = AlgorithmSettings(name=name, old_policy=old_policy, correction=correction, **extra)
    args = (settings.old_policy, settings.correction, staleness, settings.uncorrected)
    if refused is None or (refused == "stale" and staleness == 0):
        check_correction(*args)
    else:
        with pytest.raises(ValueError, match=refused):
            check_correction(*args)


def test_stale_samples_without_correction_need_a_word():
    check_correction("trainer", "none", 2, uncorrected=True)
