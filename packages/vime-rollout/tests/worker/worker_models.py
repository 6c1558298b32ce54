"""Tokenizers by code, and an engine that answers by script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from vime_proto.common.v1 import common_pb2
from vime_proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from vime_proto.sample.v1 import sample_pb2 as pb
from vime_proto.tensor import to_numpy, to_tensor
from vime_proto.version import policy_version

STOP, LENGTH, ABORT = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_ABORT
RUN = "run"
# The part of Qwen's template that matters here: consecutive tool messages share one user turn, and a newline follows the
# end token that no model samples.
CHAT_TEMPLATE = """
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- if m.tool_calls %}{% for c in m.tool_calls %}{{ '<call>' + c + '</call>' }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
# Drops the reasoning of every turn but the last: what was sampled is not in the next prompt.
FORGETFUL_TEMPLATE = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A byte-level BPE with a few merges, <eos>, <|im_start|> and <|im_end|>; ids from 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    for piece in [*alphabet, "he", "ll", "hell", "hello", "to", "ol", "tool"]:
        vocab[piece] = len(vocab)
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("t", "o"), ("o", "l"), ("to", "ol")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<bos>"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def delta(
    ids=(), number: int = 0, finish: int = 0, lineage: int = 0, logprobs=None, **fields
) -> rollout_pb2.GenerateResponse:
    """A message of a stream: new ids of policy version ``number``, each with log-prob -0.5 unless stated."""
    message = rollout_pb2.GenerateResponse(
        version=policy_version(RUN, lineage, number), engine_id="engine-0", finish_reason=finish, **fields
    )
    if len(ids):
        message.token_ids.CopyFrom(to_tensor(np.asarray(ids, np.int32)))
        values = np.full(len(ids), -0.5) if logprobs is None else np.asarray(logprobs)
        message.logprobs.CopyFrom(to_tensor(values.astype(np.float32)))
    return message


def ids_of(tensor: common_pb2.Tensor) -> list[int]:
    """Ids of a tensor as a list."""
    return to_numpy(tensor).tolist()


Script = Callable[[rollout_pb2.GenerateRequest, int], AsyncIterator[rollout_pb2.GenerateResponse]]


class ScriptedEngine(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers Generate by a function of the request and of how often its id was seen; records what it was asked."""

    def __init__(self, script: Script, **info):
        self.script = script
        self.info = {"model": "scripted", "vocab_size": 512, "max_model_len": 4096, **info}
        self.requests: list[rollout_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.running = self.most_running = 0
        self.cancelled = 0

    async def Generate(self, request, context):
        seen = sum(one.request_id == request.request_id for one in self.requests)
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async for message in self.script(request, seen):
                message.request_id = request.request_id
                yield message
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def GetModelInfo(self, request, context):
        return rollout_pb2.GetModelInfoResponse(**self.info)


def answering(ids, number: int = 0, finish: int = STOP) -> Script:
    """A script that answers every request with the same ids, in two messages."""

    async def script(request, seen):
        half = len(ids) // 2
        if half:
            yield delta(ids[:half], number)
        yield delta(ids[half:], number, finish)

    return script


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits until a condition of another task or process holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
