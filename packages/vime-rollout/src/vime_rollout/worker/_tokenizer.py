"""Text to ids and back, by ``tokenizer.json`` and the folder's chat template; no deep-learning package is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from vime_proto.errors import ContractError
from vime_rollout.worker._chat_template import compile_template

Message = Mapping[str, Any]
"""A chat message: ``role``, ``content``, and what else the chat template reads."""
# Below this many tokens, waking the tokenizer's threads costs more than they save.
_PARALLEL_TOKENS = 4096


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        folder: holds tokenizer.json (Hugging Face tokenizers), and tokenizer_config.json or chat_template.jinja for chats.
        template_variables: handed to the chat template, such as ``enable_thinking``.

    Raises:
        ContractError: no tokenizer.json, or one that cannot be read.
    """

    def __init__(self, folder: str | Path, template_variables: Mapping[str, Any] | None = None):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise ContractError("tokenizer", f"{path} does not exist; transformers' save_pretrained writes it")
        try:
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises a bare Exception for every fault of a file
            raise ContractError("tokenizer", f"{path} cannot be read: {error}") from error
        self._fast.no_padding()
        self._fast.no_truncation()
        config = _read_json(self.folder / "tokenizer_config.json")
        self._variables = {**_special_tokens(config), **(template_variables or {})}
        self._template_text = _template(self.folder, config)
        self._template = compile_template(self._template_text) if self._template_text else None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._fast.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = False) -> np.ndarray:
        """Ids of a text: int32 [n]."""
        return np.array(self._fast.encode(text, add_special_tokens=add_special_tokens).ids, dtype=np.int32)

    def encode_with_offsets(self, text: str) -> Encoding:
        """Ids and character ranges of a text, without special tokens added."""
        return self._fast.encode(text, add_special_tokens=False)

    def decode(self, sequences: Sequence[np.ndarray], skip_special_tokens: bool = True) -> list[str]:
        """Texts of several sequences of ids."""
        if sum(map(len, sequences)) < _PARALLEL_TOKENS:
            return [self._fast.decode(one.tolist(), skip_special_tokens=skip_special_tokens) for one in sequences]
        return self._fast.decode_batch([one.tolist() for one in sequences], skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """A token as it stands in the vocabulary; empty when there is none."""
        return self._fast.id_to_token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        """Whether it is an added token, which always ends what the tokenizer looks at."""
        return token_id in self._fast.get_added_tokens_decoder()

    def render(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, generate: bool = True) -> str:
        """A chat as text.

        Args:
            messages: the chat.
            tools: tool descriptions for the template.
            generate: whether the text ends where the model's turn begins.

        Raises:
            ContractError: no chat template, or one that refuses the messages.
        """
        if self._template is None:
            raise ContractError(
                "tokenizer", f"{self.folder} has no chat template: messages cannot be rendered; use text prompts"
            )
        try:
            return self._template.render(
                messages=list(messages),
                tools=tools or None,
                documents=None,
                add_generation_prompt=generate,
                **self._variables,
            )
        except Exception as error:  # a template may fail in any way that its expressions can
            raise ContractError(
                "messages", f"the chat template refuses them: {type(error).__name__}: {error}"
            ) from error


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in config.items():
        if key.endswith("_token") and value is not None and not isinstance(value, bool):
            found[key] = value["content"] if isinstance(value, dict) else value
    return found


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {one["name"]: one["template"] for one in template}
        return named.get("default")
    return template
