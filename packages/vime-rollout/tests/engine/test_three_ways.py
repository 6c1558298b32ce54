"""transformers, vLLM and Megatron agree on the log-probability of every token, before and after a weight update.

Megatron lives in another environment: VIME_PYTHON_TRAINER names an interpreter that has vime-trainer.
"""

from __future__ import annotations

import json

import models
import numpy as np
import pytest
import replaying
from conftest import running
from reference import Reference

from vime_r3.trace import decode

PROMPTS = [[1, 5, 9, 17, 33, 40, 8], [3], list(range(3, 40))]
BOUND = 1e-5

pytestmark = pytest.mark.skipif(
    not replaying.TRAINER, reason="VIME_PYTHON_TRAINER names no interpreter with vime-trainer"
)


@pytest.fixture(scope="module")
def untied():
    """An engine with a dense model whose head is its own."""
    with running("untied", models.config(), 3) as process:
        yield process


@pytest.fixture(scope="module")
def glm():
    """An engine with GLM-4.5 and route capture."""
    with running("glm", models.glm(), 4, "--route-capture") as process:
        yield process


def megatron(trainer, folder, sequences, temperature, work, routes=None):
    """Log-probabilities of every token but the first of each sequence, by ``vime-trainer logprobs``."""
    data, output = work / "tokens.jsonl", work / "logprobs.jsonl"
    lines = [{"tokens": row, "temperature": temperature} for row in sequences]
    # The same sequences once more, with routes.
    lines += [line | {"routes": ids} for line, ids in zip(lines, routes or [], strict=False)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trainer.ask("logprobs", "--model", folder, "--data", data, "--output", output)
    return [np.array(json.loads(line)["logprobs"][1:]) for line in output.read_text().splitlines()]


def spread(engine, trainer, folder, temperature, work):
    """Largest difference between any two of the three, over every generated token."""
    answers = [engine.generate(prompt, 12, temperature=temperature, ignore_eos=True, seed=5) for prompt in PROMPTS]
    reference = Reference(folder)
    rows = megatron(
        trainer, folder, [[*p, *a.tokens] for p, a in zip(PROMPTS, answers, strict=True)], temperature, work
    )
    worst = 0.0
    for prompt, answer, row in zip(PROMPTS, answers, rows, strict=True):
        three = np.stack(
            [answer.logprobs, reference.of_response(prompt, answer.tokens, temperature), row[-len(answer.tokens) :]]
        )
        worst = max(worst, float(np.ptp(three, axis=0).max()))
    print(f"largest difference at temperature {temperature}: {worst:.1e}")
    return worst


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["tied", "untied", "moe", "glm"])
def test_the_three_agree_before_and_after_an_update(name, request, trainer, tmp_path):
    engine = request.getfixturevalue(name)
    engine.pusher().push(engine.tensors, engine.next_version())
    assert spread(engine, trainer, engine.folder, 0.7, tmp_path) < BOUND
    other = models.weights(engine.config, 22)
    engine.pusher().push(other, engine.next_version(), chunks=3)
    folder = models.save(tmp_path / "other", engine.config, other)
    assert spread(engine, trainer, folder, 1.0, tmp_path) < BOUND
    engine.pusher().push(engine.tensors, engine.next_version())


@pytest.mark.timeout(900)
def test_glm_routes_are_those_of_its_sparse_layers_and_replay_needs_no_bias(glm, trainer, tmp_path):
    """The trainer is given the engine's routes and other biases of the choice: it must still score as the engine does."""
    other = models.weights(glm.config, 23)
    glm.pusher().push(other, glm.next_version(), chunks=2)
    reference = Reference.of(tmp_path / "other", glm.config, other)
    answers = [
        glm.generate(prompt, 12, temperature=1.0, ignore_eos=True, seed=6, return_routing=True) for prompt in PROMPTS
    ]
    sequences = [[*prompt, *answer.tokens] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    routes = []
    for tokens, answer in zip(sequences, answers, strict=True):
        trace = answer.last.routing
        assert list(trace.header.layer_ids) == [1, 2] and trace.header.rows == len(tokens) - 1
        ids = decode(trace).ids
        assert np.array_equal(np.sort(ids, axis=-1), reference.routes(tokens)[:-1])
        routes.append(ids.tolist())
    rolled = {name: np.roll(value, 3) if name.endswith("correction_bias") else value for name, value in other.items()}
    folder = models.save(tmp_path / "rolled", glm.config, rolled)
    scores = [answer.logprobs for answer in answers]

    def furthest(rows):
        return max(np.abs(row[-len(one) :] - one).max() for row, one in zip(rows, scores, strict=True))

    rows = megatron(trainer, folder, sequences, 1.0, tmp_path, routes)
    assert furthest(rows[: len(scores)]) > 1e-2
    assert furthest(rows[len(scores) :]) < BOUND
    glm.pusher().push(glm.tensors, glm.next_version())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["moe", "glm"])
def test_a_trainer_with_other_routers_runs_the_experts_of_the_engine(name, request, trainer, tmp_path):
    """Its own choice differs in more than a tenth of the tokens; gates are its own, over the engine's experts."""
    engine = request.getfixturevalue(name)
    # As large as weights of trained models are, not more: then float32 leaves errors below a millionth.
    tensors = {key: value * 0.6 if value.ndim == 2 else value for key, value in engine.tensors.items()}
    folder = models.save(tmp_path / "same", engine.config, tensors)
    engine.pusher().push(tensors, engine.next_version())
    answers = replaying.generate(engine, PROMPTS, 40)
    engine.pusher().push(engine.tensors, engine.next_version())
    same = trainer.replay(folder, answers, tmp_path)
    assert np.abs(answers.of_answers(same["replayed"]) - answers.scores).mean() < 1e-6
    assert same["flips"].sum() == 0

    noise = np.random.default_rng(3)
    gate = "mlp.gate.weight"
    drifted = {
        key: value + 0.05 * noise.standard_normal(value.shape).astype(np.float32) if key.endswith(gate) else value
        for key, value in tensors.items()
    }
    folder = models.save(tmp_path / "drifted", engine.config, drifted)
    got = trainer.replay(folder, answers, tmp_path)
    rows = answers.has_row
    assert (got["flips"] > 0.1 * rows.sum()).all()
    experts = np.zeros_like(got["chosen"])
    np.put_along_axis(experts, answers.routes.transpose(1, 0, 2).astype(np.int64), True, axis=2)
    assert np.array_equal(got["chosen"][:, rows], experts[:, rows])

    reference = Reference(folder)
    parts = np.cumsum(answers.lengths)[:-1]
    for tokens, ids, ours in zip(
        answers.sequences, np.split(answers.routes, parts), np.split(got["replayed"], parts), strict=True
    ):
        wanted = reference.forced(tokens, ids[:-1])
        assert np.abs(ours[1:] - wanted).mean() < 1e-6 and np.abs(ours[1:] - wanted).max() < BOUND
    assert np.abs(answers.of_answers(got["alone"] - got["replayed"])).mean() > 1e-3
    # Every expert that the engine chose learns, whether or not the trainer alone would have chosen it.
    used = experts[:, rows].any(axis=1)
    assert (np.abs(got["gates"]).sum(axis=2)[used] > 0).all()
