"""What the configuration of an algorithm accepts and refuses."""

import pytest
from pydantic import ValidationError

from vime_trainer import algorithms
from vime_trainer.algorithms import Algorithm, AlgorithmSettings, algorithm_of, check_correction, get_algorithm


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
        "advantage_streams",
        "algorithm_of",
        "centred",
        "check_correction",
        "clipped",
        "correction_scale",
        "correction_weights",
        "critic_objective",
        "gae",
        "get_algorithm",
        "group_statistics",
        "kl_penalty",
        "kl_terms",
        "log_ratio",
        "normalised",
        "objective",
        "overlong_penalty",
        "proximal_alpha",
        "proximal_logprobs",
        "required_columns",
        "sequence_mask",
        "token_clipped_loss",
        "token_rewards",
        "token_weights",
        "value_loss",
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
        ("trainer", "importance", None),
        ("trainer", "k3", None),
        ("linear", "tis", None),
        ("linear", "none", "stale"),
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


def test_a_users_loss_and_advantage_by_import_path():
    settings = AlgorithmSettings(name="gspo", loss="plugin:loss")
    algorithm = algorithm_of(settings)
    assert algorithm.loss.__module__ == "plugin" and algorithm.advantage is get_algorithm("gspo").advantage
    assert algorithm.aggregation == "sequence" and settings.clip_high == 4e-4
    assert algorithm_of(AlgorithmSettings(advantage="plugin:advantage")).advantage.__module__ == "plugin"
    for bad, message in (
        ("plugin:nothing", "cannot import"),
        ("plugin", '"module:function"'),
        ("plugin:REINFORCE", "not a fu"),
    ):
        with pytest.raises(ValidationError, match=message):
            AlgorithmSettings(loss=bad)


def test_defaults_of_a_table_are_kept_key_by_key():
    kl = AlgorithmSettings(name="reinforce_plus_plus", kl={"coefficient": 0.01}).kl
    assert (kl.coefficient, kl.place, kl.estimator) == (0.01, "reward", "k1")
    assert AlgorithmSettings(name="reinforce_plus_plus_baseline", kl={"coefficient": 0.01}).kl.estimator == "k2"


def test_a_kl_loss_without_a_gradient_is_refused():
    with pytest.raises(ValidationError, match='gradient of "k1" is zero in expectation'):
        AlgorithmSettings(kl={"coefficient": 0.1, "estimator": "k1"})
    assert AlgorithmSettings(kl={"coefficient": 0.1, "estimator": "k1", "place": "reward"}).kl.place == "reward"


@pytest.mark.parametrize("name", ["maxrl", "distillation"])
def test_a_kl_within_a_reward_that_nobody_reads_is_refused(name):
    with pytest.raises(ValidationError, match=f"kl.place: .*no meaning for {name}"):
        AlgorithmSettings(name=name, kl={"coefficient": 0.1, "place": "reward"})
    assert AlgorithmSettings(name=name, kl={"coefficient": 0.1}).kl.coefficient == 0.1


@pytest.mark.parametrize("settings", [{"old_policy": "engine"}, {"old_policy": "linear"}, {"correction": "none"}])
def test_normalised_weights_need_weights_before_the_cut(settings):
    with pytest.raises(ValidationError, match="correction_normalise: needs"):
        AlgorithmSettings(correction_normalise=True, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"correction": "icepop", "correction_high": 0.3},
        {"correction": "geometric", "correction_low": 1.1},
        {"correction_high": 0.0},
        {"correction_low": -1.0},
        {"correction_high": float("nan")},
    ],
)
def test_bounds_that_leave_no_weight_are_refused(settings):
    with pytest.raises(ValidationError, match="correction_low, correction_high: .* leave no weight"):
        AlgorithmSettings(**settings)


def test_a_critic_needs_its_loss():
    with pytest.raises(ValueError, match="algorithm mine: needs_critic and value_loss go together"):
        Algorithm("mine", get_algorithm("ppo").advantage, get_algorithm("ppo").loss, needs_critic=True)
