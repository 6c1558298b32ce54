"""Ids of a conversation, built turn by turn, against one rendering of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import worker_models as models

from vime_proto.sample.v1 import sample_pb2 as pb
from vime_rollout.worker import Tokenizer
from vime_rollout.worker._conversation import Conversation

TOOL, TEMPLATE = pb.SEGMENT_ROLE_TOOL, pb.SEGMENT_ROLE_TEMPLATE
USER = {"role": "user", "content": "hello, 2+2?"}


def build(tokenizer, turns, messages=(USER,)):
    """Ids as a worker builds them, when the model samples each ``(content, observation)``'s content and the end token."""
    conversation = Conversation(tokenizer, messages)
    ids = conversation.prompt_ids()
    for content, observation in turns:
        sampled = tokenizer.encode(content + "<|im_end|>")
        step = conversation.advance(sampled, {"role": "assistant", "content": content}, observation)
        assert step.given is not None
        ids = np.concatenate([ids, sampled, *(np.frombuffer(part, "<i4") for _, part in step.given)])
    return conversation, ids


@pytest.mark.parametrize(
    "turns",
    [
        [("use the tool", [{"role": "tool", "content": "four"}])],
        [
            ("two tools", [{"role": "tool", "content": "four"}, {"role": "tool", "content": "hello tool"}]),
            ("again", [{"role": "tool", "content": "  five\n"}]),
        ],
        [("ask", [{"role": "user", "content": "go on"}]), ("", [{"role": "user", "content": "?"}])],
        [(" spaces \n", [{"role": "user", "content": "\u00e4\u4e2d\U0001f600"}])],
    ],
)
def test_ids_built_turn_by_turn_equal_one_rendering(tokenizer, turns):
    conversation, ids = build(tokenizer, turns)
    assert ids.tolist() == tokenizer.encode(tokenizer.render(conversation.messages)).tolist()


def test_observations_are_told_from_what_the_template_adds(tokenizer):
    conversation = Conversation(tokenizer, [USER])
    observation = [{"role": "tool", "content": "four"}, {"role": "tool", "content": "five"}]
    step = conversation.advance(tokenizer.encode("ok<|im_end|>"), {"role": "assistant", "content": "ok"}, observation)
    parts = [
        (role, tokenizer.decode([np.frombuffer(ids, "<i4")], skip_special_tokens=False)[0]) for role, ids in step.given
    ]
    assert [text for role, text in parts if role == TOOL] == ["four", "five"]
    assert parts[0] == (TEMPLATE, "\n<|im_start|>user\n<tool_response>\n")
    assert parts[-1] == (TEMPLATE, "\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_a_turn_that_ended_without_its_end_token_gets_it_from_the_template(tokenizer):
    conversation = Conversation(tokenizer, [USER])
    sampled = tokenizer.encode("look </search>")
    step = conversation.advance(
        sampled, {"role": "assistant", "content": "look </search>"}, [{"role": "user", "content": "x"}]
    )
    added = np.concatenate([np.frombuffer(ids, "<i4") for _, ids in step.given])
    (text,) = tokenizer.decode([added], skip_special_tokens=False)
    assert text == "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    whole = np.concatenate([tokenizer.encode(Conversation(tokenizer, [USER]).text), sampled, added])
    assert whole.tolist() == tokenizer.encode(conversation.text).tolist()


def test_sampled_ids_stay_although_their_text_has_fewer(tokenizer):
    letters = np.concatenate([tokenizer.encode(one) for one in "hello"])
    assert len(letters) > len(tokenizer.encode("hello"))
    conversation = Conversation(tokenizer, [USER])
    sampled = np.concatenate([letters, tokenizer.encode("<|im_end|>")])
    step = conversation.advance(sampled, {"role": "assistant", "content": "hello"}, [{"role": "user", "content": "x"}])
    # No new sample: the prefix stays as it was sampled, and only what follows was tokenised.
    assert step.given is not None
    (text,) = tokenizer.decode([np.concatenate([np.frombuffer(ids, "<i4") for _, ids in step.given])], False)
    assert text == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_half_a_character_stays_as_it_was_sampled(tokenizer):
    half = tokenizer.encode("\U0001f600")[:2]
    (text,) = tokenizer.decode([half])
    conversation = Conversation(tokenizer, [USER])
    sampled = np.concatenate([half, tokenizer.encode("<|im_end|>")])
    step = conversation.advance(sampled, {"role": "assistant", "content": text}, [{"role": "user", "content": "x"}])
    assert step.given is not None


def test_a_template_that_rewrites_the_past_starts_a_new_sample(tmp_path):
    tokenizer = Tokenizer(models.write_tokenizer(tmp_path, models.FORGETFUL_TEMPLATE))
    conversation = Conversation(tokenizer, [USER])
    content = "<think>hm</think>4"
    step = conversation.advance(
        tokenizer.encode(content + "<|im_end|>"),
        {"role": "assistant", "content": content},
        [{"role": "user", "content": "x"}],
    )
    assert step.given is None
    assert step.prompt_ids.tolist() == tokenizer.encode(tokenizer.render(conversation.messages)).tolist()
    assert "hm" not in tokenizer.decode([step.prompt_ids])[0]


def test_a_turn_with_tool_calls_may_read_otherwise_than_it_was_sampled(tokenizer):
    conversation = Conversation(tokenizer, [USER])
    sampled = tokenizer.encode("so<call>add</call><|im_end|>")
    assistant = {"role": "assistant", "content": "so", "tool_calls": ["add"]}
    step = conversation.advance(sampled, assistant, [{"role": "tool", "content": "4"}])
    assert step.given is not None


def test_rendering_equals_transformers(tokenizer, tokenizer_folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    messages = [USER, {"role": "assistant", "content": "a & <b>"}, {"role": "tool", "content": "4"}]
    for generate in (True, False):
        assert tokenizer.render(messages, generate=generate) == theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate
        )
    text = tokenizer.render(messages)
    assert (
        tokenizer.encode(text).tolist() == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    )
    ids = tokenizer.encode(text)
    assert tokenizer.decode([ids]) == [theirs.decode(ids, skip_special_tokens=True)]
