"""Supervised fine-tuning: what is learnt, in which order, and that a split run equals a whole one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests_support import make_tokenizer, tiny_moe_folder

from vime_trainer.checkpoint import CheckpointError
from vime_trainer.optim import Optimizer, OptimizerSettings
from vime_trainer.policy import Policy
from vime_trainer.sft import (
    Cursor,
    DataError,
    DataSettings,
    Example,
    Order,
    SftSettings,
    micro_batches,
    read_examples,
    run_sft,
    train_step,
)


def write_rows(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reversal(count=64):
    """Answers are prompts reversed: five letters of the first four."""
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcd"), 4)) for _ in range(count)]
    return [{"prompt": f"<bos>{word}=", "response": word[::-1]} for word in words]


def settings_for(tmp_path, name="run", **over):
    base = {
        "model": tmp_path / "model",
        "output": tmp_path / name,
        "data": {"files": [tmp_path / "rows.jsonl"]},
        "batch_size": 16,
        "optimizer": {"learning_rate": 1e-2, "schedule": "linear", "warmup_updates": 3, "weight_decay": 0.01},
        "metrics": {"tensorboard": False},
        "log_interval": 1000,
    }
    return SftSettings(**(base | over))


@pytest.fixture
def ready(tmp_path):
    tiny_moe_folder(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", reversal())
    return tmp_path


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_learns_a_toy_task_and_exports_what_transformers_loads(ready):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = run_sft(settings_for(ready, steps=150, metrics={"tensorboard": True}))
    lines = metrics_of(ready / "run")
    assert [line["step"] for line in lines] == list(range(1, 151))
    assert lines[0]["loss"] > 2.5 and lines[-1]["loss"] < 0.3
    assert lines[0]["learnt_tokens"] == 16 * 5 and lines[0]["tokens"] == 16 * 11
    assert any((ready / "run" / "tensorboard").iterdir())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    right = 0
    for row in reversal()[:24]:
        prompt = tokenizer(row["prompt"], return_tensors="pt")
        answer = model.generate(**prompt, max_new_tokens=5, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        right += tokenizer.decode(answer).replace(" ", "") == row["response"] + "<eos>"
    assert right > 14


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_split_run_equals_a_whole_one(ready, asynchronous):
    whole = run_sft(settings_for(ready, "whole", steps=12))
    limit = settings_for(ready, "split", steps=12, checkpoint={"interval": 5, "asynchronous": asynchronous})
    stopped = 0

    def stop(*args, **kwargs):
        nonlocal stopped
        stopped += 1
        if stopped == 8:
            raise KeyboardInterrupt
        return train_step(*args, **kwargs)

    from vime_trainer.sft import _run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_run, "train_step", stop)
        with pytest.raises(KeyboardInterrupt):
            run_sft(limit)
    assert [line["step"] for line in metrics_of(ready / "split")] == list(range(1, 8))
    split = run_sft(limit)
    assert (whole / "model.safetensors").read_bytes() == (split / "model.safetensors").read_bytes()
    want = [(line["step"], line["loss"], line["learning_rate"]) for line in metrics_of(ready / "whole")]
    again = {line["step"]: (line["step"], line["loss"], line["learning_rate"]) for line in metrics_of(ready / "split")}
    assert [again[step] for step, *_ in want] == want


def test_a_finished_or_foreign_run_is_refused(ready):
    run_sft(settings_for(ready, steps=3))
    with pytest.raises(CheckpointError, match="trained 3 steps already, and the run ends after 2"):
        run_sft(settings_for(ready, steps=2))
    with pytest.raises(CheckpointError, match=r"its run had .*'seed': 0.*, this one has .*'seed': 1"):
        run_sft(settings_for(ready, steps=5, seed=1))


def test_epochs_end_with_a_short_batch(ready):
    run_sft(settings_for(ready, epochs=2, batch_size=30))
    lines = metrics_of(ready / "run")
    assert [line["rows"] for line in lines] == [30, 30, 30, 30, 8]
    assert lines[-1]["epoch"] == 2.0


def test_the_cut_into_micro_batches_does_not_change_the_gradient(ready):
    random = np.random.default_rng(1)
    examples = []
    for length in (4, 12, 7, 12, 3):
        learnt = random.random(length) < 0.5
        learnt[-1] = True
        examples.append(Example(random.integers(0, 20, length), learnt))
    results = []
    for limit in (1000, 14, 1):
        policy = Policy.from_hf(ready / "model")
        optimizer = Optimizer(policy, OptimizerSettings(clip_grad_norm=0.0))
        done = train_step(policy, optimizer, examples, limit)
        grads = {name: param.main_grad.clone() for name, param in policy.parameters().items()}
        results.append((done.loss, done.result.grad_norm, grads, len(list(micro_batches(examples, limit)))))
    assert [parts for *_, parts in results] == [1, 3, 5]
    for loss, norm, grads, _ in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6)
        assert norm == pytest.approx(results[0][1], rel=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, results[0][2][name], rtol=0, atol=1e-6, msg=name)


def read(tmp_path, rows, limit=100, **over):
    file = write_rows(tmp_path / "rows.jsonl", rows)
    return read_examples(DataSettings(files=[file], **over), make_tokenizer(), limit)


def test_prompts_are_not_learnt_and_answers_end_with_the_end_token(tmp_path):
    tokenizer = make_tokenizer()
    (example,), dropped = read(tmp_path, [{"prompt": "<bos>ab=", "response": "ba"}])
    assert tokenizer.decode(example.tokens.tolist()).replace(" ", "") == "<bos>ab=ba<eos>"
    assert example.learnt.tolist() == [False] * 4 + [True] * 3 and dropped == 0
    (bare,), _ = read(tmp_path, [{"q": "ab", "a": "b"}], prompt_field="q", response_field="a", append_eos=False)
    assert bare.learnt.tolist() == [False, False, True]


CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "ba"},
    {"role": "user", "content": "cd"},
    {"role": "assistant", "content": "dc"},
]


def test_assistant_turns_are_learnt_with_their_end_token_but_no_separator(tmp_path):
    tokenizer = make_tokenizer()
    (example,), _ = read(tmp_path, [{"messages": CHAT}])
    full = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert example.tokens.tolist() == list(full)
    pieces = [tokenizer.decode([token]) for token in example.tokens]
    assert [p for p, learnt in zip(pieces, example.learnt, strict=True) if learnt] == [
        "b",
        "a",
        "<eos>",
        "d",
        "c",
        "<eos>",
    ]
    (last,), _ = read(tmp_path, [{"messages": CHAT}], train_turns="last")
    assert last.tokens.tolist() == list(full) and last.learnt.sum() == 3


def test_a_template_that_rewrites_earlier_turns_is_refused_for_all_turns(tmp_path):
    tokenizer = make_tokenizer()
    # As templates that drop an earlier turn's thinking do.
    thought = "{{ 'h' if loop.last and m['role'] == 'assistant' else '' }}{{ m['content'] }}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m['content'] }}", thought)
    settings = DataSettings(files=[write_rows(tmp_path / "rows.jsonl", [{"messages": CHAT}])])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: turn 1: the chat template renders it .*train_turns = 'last'"):
        read_examples(settings, tokenizer, 100)
    (last,), _ = read_examples(settings.model_copy(update={"train_turns": "last"}), tokenizer, 100)
    assert last.learnt.sum() == 4


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "ab", "response": ""}, r"rows\.jsonl:2: 'response' is empty"),
        ({"prompt": "ab"}, r"rows\.jsonl:2: field 'response' must be text; the row has prompt"),
        ({"prompt": "ab", "response": 3}, "field 'response' must be text"),
        ([1], "not a JSON object"),
        ({"messages": []}, "no assistant turn"),
        ({"messages": [{"content": "x"}]}, "objects with a role"),
        ({"prompt": "abcd" * 30, "response": "a"}, r"122 tokens; the limit is 100"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, [{"prompt": "ab", "response": "b"}, row])


def test_long_rows_can_be_dropped_and_are_counted(tmp_path):
    rows = [{"prompt": "ab", "response": "b"}, {"prompt": "abcd" * 30, "response": "a"}]
    examples, dropped = read(tmp_path, rows, too_long="drop")
    assert (len(examples), dropped) == (1, 1)
    with pytest.raises(DataError, match=r"no rows to train on \(1 dropped\)"):
        read(tmp_path, rows[1:], too_long="drop")
    (tmp_path / "rows.jsonl").write_text("{\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: not JSON"):
        read_examples(DataSettings(files=[tmp_path / "rows.jsonl"]), make_tokenizer(), 9)


def test_order_is_a_function_of_seed_and_position():
    order = Order([1] * 10, seed=3, shuffle=True, size=4)
    cursor, seen, cursors = Cursor(), [], []
    for _ in range(5):
        cursors.append(cursor)
        rows, cursor = order.batch(cursor)
        seen.append(rows)
    flat = [row for rows in seen for row in rows]
    assert sorted(flat[:10]) == sorted(flat[10:20]) == list(range(10)) and flat[:10] != flat[10:20]
    assert cursor == Cursor(2, 0)
    again = Order([1] * 10, seed=3, shuffle=True, size=4)
    assert [again.batch(at)[0] for at in reversed(cursors)] == seen[::-1]
    assert Order([1] * 10, seed=4, shuffle=True, size=4).batch(Cursor())[0] != seen[0]
    assert Order([1] * 10, seed=4, shuffle=False, size=4).batch(Cursor())[0] == [0, 1, 2, 3]


def test_token_budgets_hold_and_lose_no_row():
    lengths = [5, 9, 3, 30, 2, 2, 8]
    order = Order(lengths, seed=0, shuffle=True, tokens=12)
    cursor, batches = Cursor(), []
    while cursor.epoch < 1:
        rows, cursor = order.batch(cursor, to_epoch=1)
        batches.append(rows)
    assert sorted(row for rows in batches for row in rows) == list(range(7))
    assert all(len(rows) == 1 or sum(lengths[row] for row in rows) <= 12 for rows in batches)
    assert order.count(1) == len(batches)


def test_settings_that_contradict_themselves_are_refused(tmp_path):
    with pytest.raises(ValidationError, match="exactly one of steps and epochs"):
        settings_for(tmp_path)
    with pytest.raises(ValidationError, match="exactly one of batch_size and batch_tokens"):
        settings_for(tmp_path, steps=1, batch_tokens=5)


def test_a_rank_that_is_gone_is_one_line(tmp_path, monkeypatch, capsys):
    from vime_trainer import sft
    from vime_trainer.cli import main

    said = (
        "[third_party/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. This is\nlong"
    )

    def lost(*arguments):
        raise RuntimeError(said)

    monkeypatch.setattr(sft, "run_sft", lost)
    words = ["sft", "--model=m", f"--output={tmp_path}", '--data.files=["f"]', "--steps=1", "--batch_size=1"]
    assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vime-trainer sft: another rank ended or does not answer (") and "This is" not in line
    # Anything else is a fault of the program, and shows where.
    said = "shapes differ"
    with pytest.raises(RuntimeError, match="shapes differ"):
        main(words)
