"""What the loss and the advantage see besides the live policy: old policy, teacher, reference, critic."""

import pytest
import torch
from make import VOCAB, answer, floats, group, index_of, prompt, rollout, sample, samples_of, tool
from stages import Stages, settings_for
from test_loop import run, steps
from test_train import TinyBackend, run_settings, some_groups
from toy import Outcome, ToyBackend, run_passes

from vime_proto.sample.v1 import sample_pb2
from vime_trainer.algorithms import get_algorithm
from vime_trainer.batch import RefusedSamplesError, read_columns
from vime_trainer.rl import FolderSource, write_batch
from vime_trainer.rl._step import BatchStep
from vime_trainer.rl._team import Team
from vime_trainer.rl._train import BatchTrainer
from vime_trainer.value import ValueOutputs


class Counting(TinyBackend):
    """Counts passes with and without a loss."""

    def __init__(self, **options):
        super().__init__(**options)
        self.passes = {"scored": 0, "trained": 0}

    def run(self, batches, wanted, loss=None):
        self.passes["scored" if loss is None else "trained"] += 1
        return super().run(batches, wanted, loss)


def train(groups, backend, ordinal=0, **changes):
    index = index_of(groups, ordinal=ordinal)
    wanted = {"versions": True} if changes.get("algorithm", {}).get("old_policy") == "linear" else {}
    columns = read_columns(index, samples_of(groups), **wanted)
    return BatchTrainer(backend, run_settings(**changes)).train(index, columns, 4).figures


@pytest.mark.parametrize(
    ("algorithm", "parts", "scored"),
    [
        ({}, 1, 0),
        ({}, 2, 1),
        ({"old_policy": "engine"}, 2, 0),
        ({"old_policy": "linear"}, 2, 0),
        ({"kl": {"coefficient": 0.1, "place": "reward"}}, 1, 1),
        ({"correction_normalise": True}, 1, 1),
    ],
)
def test_log_probs_are_computed_again_only_where_something_needs_them(algorithm, parts, scored):
    backend = Counting()
    figures = train(some_groups(), backend, algorithm=algorithm, batch={"optimizer_steps": parts})
    assert backend.passes == {"scored": scored, "trained": parts}
    assert figures["optimizer_steps"] == parts
    # The difference to the engine is measured in either way.
    assert figures["train_rollout_logprob_abs_diff/max"] < 1e-6


def test_the_linear_old_policy_lies_between_engine_and_live_policy():
    from make import TinyPolicy

    groups = some_groups(policy=TinyPolicy(9))
    # The engine is a batch behind: at the first step the old policy is the live one, later it lags.
    algorithm = {"old_policy": "linear", "correction": "none"}
    one = train(groups, TinyBackend(), ordinal=1, algorithm=algorithm)
    assert one["policy/ratio_min"] == one["policy/ratio_max"] == 1
    two = train(groups, TinyBackend(), ordinal=1, algorithm=algorithm, batch={"optimizer_steps": 2})
    assert two["policy/ratio_min"] < 1 < two["policy/ratio_max"]


def taught(folder, teacher):
    """Two rollouts whose segments bring the teacher's log-probs, as a folder of exported batches."""
    rollouts = []
    for i, tokens in enumerate(([3, 4, 5], [6, 7])):
        segment = answer(tokens)
        if teacher is not None:
            segment.generation.teacher_logprobs.CopyFrom(floats([teacher] * len(tokens)))
        rollouts.append(rollout(f"r{i}", float(i), sample(f"s{i}", prompt(), segment)))
    groups = [group("g", *rollouts)]
    write_batch(folder, index_of(groups, batch_id="000000"), samples_of(groups))
    return FolderSource(folder)


def test_a_teachers_log_probs_come_with_the_samples(tmp_path):
    settings = run_settings(batch={"groups": 1, "group_size": 2}, algorithm={"name": "distillation"})
    gradients = []
    for teacher in (-0.5, -3.0):
        source, backend = taught(tmp_path / str(teacher), teacher), TinyBackend()
        result = BatchStep(settings, backend, source, Team()).train(source.lease(), measure=False)
        assert result.figures["optimizer_steps"] == 1
        gradients.append(backend.gradients[0])
    assert any(not torch.allclose(a, b) for a, b in zip(*gradients, strict=True))
    source = taught(tmp_path / "none", None)
    with pytest.raises(RefusedSamplesError, match=r"'s0': .*teacher_logprobs: missing"):
        BatchStep(settings, TinyBackend(), source, Team()).train(source.lease(), measure=False)


class TinyCritic:
    """One value a token id, trained by plain gradient descent."""

    def __init__(self):
        self.weight = torch.zeros(VOCAB, requires_grad=True)
        self.steps = 0

    def run(self, batches, wanted, loss=None):
        def forward(batch, mask):
            return ValueOutputs(torch.where(mask, self.weight[batch.tokens], torch.zeros(())))

        return run_passes(forward, batches, wanted, loss)

    def zero_grad(self):
        self.weight.grad = None

    def step(self):
        norm = float(self.weight.grad.norm())
        with torch.no_grad():
            self.weight -= self.weight.grad
        self.steps += 1
        return Outcome(True, 1.0, norm)


def test_the_critic_learns_beside_the_policy_and_first_alone():
    backend = TinyBackend(learning_rate=0.1)
    backend.critic = TinyCritic()
    groups = some_groups()
    critic = {"warmup_batches": 1, "optimizer_steps": 3, "epochs": 2}
    settings = run_settings(algorithm={"name": "ppo"}, batch={"optimizer_steps": 2}, critic=critic)
    trainer = BatchTrainer(backend, settings)
    seen = []
    for ordinal in range(3):
        index = index_of(groups, ordinal=ordinal)
        seen.append(trainer.train(index, read_columns(index, samples_of(groups)), 4).figures)
    assert [row["critic/optimizer_steps"] for row in seen] == [6, 6, 6] and backend.critic.steps == 18
    assert [row["optimizer_steps"] for row in seen] == [0, 2, 2] and len(backend.gradients) == 4
    assert "loss" not in seen[0] and "loss" in seen[1]
    # Measured in the warm-up as well.
    assert seen[0]["train_rollout_logprob_abs_diff/max"] < 1e-6
    errors = [row["critic/value_error"] for row in seen]
    assert 0 < errors[2] < errors[1] < errors[0] and seen[0]["critic/loss"] > seen[2]["critic/loss"]


class Counter(TinyCritic):
    """A prefix is worth its number of tokens."""

    def run(self, batches, wanted, loss=None):
        def forward(batch, mask):
            return ValueOutputs(torch.where(mask, batch.positions + self.weight[0], torch.zeros(())))

        return run_passes(forward, batches, wanted, loss)


SEEN = []


def watched(batch, settings):
    SEEN.append(batch)
    return get_algorithm("ppo").advantage(batch, settings)


@pytest.mark.parametrize("budget", [1000, 6])
def test_the_critic_sees_all_that_a_truncated_rollout_has(budget):
    cut = sample_pb2.ROLLOUT_STATUS_TRUNCATED
    groups = [
        group(
            "g",
            rollout("a", 1.0, sample("a0", prompt(), answer([3, 4, 5]))),
            # Two samples, the second with a tool's answer at its end; a third, of which nothing is trained.
            rollout(
                "b",
                0.0,
                sample("b0", prompt(), answer([3, 4])),
                sample("b1", prompt(), answer([5]), tool([6, 7])),
                sample("b2", prompt((1, 2, 3))),
                status=cut,
            ),
            rollout("c", 0.0, sample("c0", prompt(), answer([3, 4, 5, 6])), status=cut),
            rollout("d", 0.0, sample("d0", prompt((1,))), status=cut),
        )
    ]
    for on, ends in ((True, [0, 5, 6, 0]), (False, None)):
        algorithm = {"name": "ppo", "advantage": "test_streams:watched", "bootstrap_truncated": on}
        backend = TinyBackend()
        backend.critic = Counter()
        train(groups, backend, algorithm=algorithm, batch={"token_budget": budget})
        batch = SEEN.pop()
        assert (None if batch.end_values is None else batch.end_values.tolist()) == ends
        # Those before the trainable tokens are the same, wherever a sample became longer.
        assert batch.values[batch.mask].tolist() == [2, 3, 4, 2, 3, 2, 2, 3, 4, 5]


def test_a_batch_of_which_a_sample_is_missing_is_refused_not_exported(tmp_path):
    class Losing(FolderSource):
        def fetch(self, leased, samples=None, routes=None):
            found = dict(super().fetch(leased, samples, routes))
            del found["s1"]
            return found

    taught(tmp_path / "given", -0.5)
    source = Losing(tmp_path / "given")
    settings = run_settings(export_batches=tmp_path / "out")
    with pytest.raises(RefusedSamplesError, match="'s1': .*not delivered"):
        BatchStep(settings, TinyBackend(), source, Team()).train(source.lease(), measure=False)
    assert not (tmp_path / "out").exists()


def test_the_reference_follows_the_policy_and_a_resume_takes_it_back(tmp_path):
    algorithm = {"kl": {"coefficient": 0.1, "refresh_interval": 2}}
    with Stages(rows=60) as stages:
        changes = {"algorithm": algorithm, "checkpoint": {"interval": 1, "keep": 2}}
        run(settings_for(stages, tmp_path, max_steps=3, **changes))
        kept = {path.name for path in (tmp_path / "reference").iterdir()}
        assert kept == {"step-00000002"}
        _, backend = run(settings_for(stages, tmp_path, max_steps=4, **changes))
        kl = {row["step"]: row["policy/kl"] for row in steps(tmp_path)}
        # Equal weights have no divergence: at the start, and right after the refresh.
        assert kl[1] == pytest.approx(0, abs=1e-12) and kl[3] == pytest.approx(0, abs=1e-12) and kl[2] > 1e-9 < kl[4]
        for name, value in backend.hf_tensors():
            # Batch 4 refreshed it again.
            assert torch.equal(backend.reference[name], value)
        resumed = ToyBackend()
        resumed.load_reference(tmp_path / "reference" / "step-00000002")
        state = resumed.restore(tmp_path / "checkpoints" / "step-00000003")
        assert state.cursor == {"batch": 3, "reference": 2}
        assert not torch.equal(resumed.reference["lm_head.weight"], resumed.weights["lm_head.weight"])
