"""What a Hugging Face folder says about its model: tensors, vocabulary, experts. Reads config.json and safetensors headers."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.errors import ContractError
from vime_proto.update_state import Expected, digest_of

DTYPES = {
    "float32": common.DTYPE_FLOAT32,
    "bfloat16": common.DTYPE_BFLOAT16,
    "float16": common.DTYPE_FLOAT16,
}
_SAFETENSORS_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
_SAFETENSORS = {
    "BOOL": common.DTYPE_BOOL, "U8": common.DTYPE_UINT8, "I8": common.DTYPE_INT8, "I16": common.DTYPE_INT16,
    "I32": common.DTYPE_INT32, "I64": common.DTYPE_INT64,
}  # fmt: skip
_LARGEST_HEADER = 100 << 20


@dataclasses.dataclass(frozen=True)
class ModelDescription:
    """A model as its folder describes it.

    Attributes:
        folder: the folder.
        architecture: such as "Qwen3MoeForCausalLM".
        vocab_size: ids are in [0, vocab_size).
        max_model_len: most tokens of prompt and response.
        eos_token_ids: ids that end a response.
        experts, top_k: routed experts of a layer and of a token; 0 for a dense model.
        moe_layer_ids: global numbers of the MoE layers, ascending.
        expected: Dtype and shape of every tensor that a full weight update must hold, by Hugging Face name.
        dtype: Dtype of the weights in the engine.
    """

    folder: Path
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    experts: int
    top_k: int
    moe_layer_ids: tuple[int, ...]
    expected: Expected
    dtype: int

    @property
    def digest(self) -> str:
        """The model digest of ``expected``."""
        return digest_of(self.expected)


def describe(folder: str | Path, dtype: str = "float32", max_model_len: int | None = None) -> ModelDescription:
    """Reads a folder.

    Args:
        folder: holds config.json and ``*.safetensors``.
        dtype: element type of the weights in the engine; weight updates come in it.
        max_model_len: a limit below the model's own.

    Raises:
        ContractError: a file or key is missing, or the limit is above the model's own.
    """
    path = Path(folder)
    config = _json(path / "config.json")
    text = {**config, **config.get("text_config", {})}
    longest = text.get("max_position_embeddings")
    if max_model_len is not None and longest is not None and max_model_len > longest:
        raise ContractError(
            "max_model_len", f"{max_model_len} is above the model's max_position_embeddings of {longest}"
        )
    limit = max_model_len or longest
    if limit is None:
        raise ContractError("max_model_len", f"{path}/config.json has no max_position_embeddings; state a limit")
    experts, top_k, layers = _experts(text)
    architectures = config.get("architectures") or [""]
    return ModelDescription(
        folder=path,
        architecture=architectures[0],
        vocab_size=_required(text, "vocab_size", path),
        max_model_len=limit,
        eos_token_ids=_eos(path, text),
        experts=experts,
        top_k=top_k,
        moe_layer_ids=layers,
        expected=expected_tensors(path, text, dtype),
        dtype=DTYPES[dtype],
    )


def expected_tensors(folder: Path, config: Mapping[str, Any], dtype: str) -> Expected:
    """What a full weight update must hold: the checkpoint's tensors that the engine loads, floats in the engine's dtype.

    Left out are a tied head (a copy of the embedding), rotary tables (computed) and layers behind the last one
    (multi-token prediction, which the engine does not load). Routing biases stay in float32.
    """
    layers = config.get("num_hidden_layers")
    tied = bool(config.get("tie_word_embeddings", False))
    expected: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, (kind, shape) in sorted(_headers(folder).items()):
        if (tied and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq"):
            continue
        number = re.search(r"\.layers\.(\d+)\.", name)
        if number and layers is not None and int(number[1]) >= layers:
            continue
        if kind in _SAFETENSORS_FLOATS:
            keeps = name.endswith("e_score_correction_bias")
            expected[name] = (common.DTYPE_FLOAT32 if keeps else DTYPES[dtype], shape)
        elif kind in _SAFETENSORS:
            expected[name] = (_SAFETENSORS[kind], shape)
        else:
            raise ContractError("model", f"tensor {name!r} has the element type {kind}, which no weight update carries")
    return expected


def update_groups(names: list[str]) -> dict[str, str]:
    """The module that each tensor is fused into, by name: an update holds all tensors of a module or none.

    The engine rebuilds a fused module from what an update brings: query, key and value of a layer are one module, gate and
    up projection are one, and all routed experts of a layer are one.
    """
    groups = {}
    for name in names:
        module = re.sub(r"\.experts\..*$", ".experts", name.rpartition(".")[0] if ".experts." not in name else name)
        module = re.sub(r"\.(q|k|v)_proj$", ".qkv_proj", module)
        module = re.sub(r"\.(gate|up)_proj$", ".gate_up_proj", module)
        groups[name] = module
    return groups


def _experts(config: Mapping[str, Any]) -> tuple[int, int, tuple[int, ...]]:
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(config[key]) for key in keys if config.get(key)), 0)
    if not experts:
        return 0, 0, ()
    layers = range(_required(config, "num_hidden_layers", "the model"))
    dense = int(config.get("first_k_dense_replace") or 0)
    step = int(config.get("decoder_sparse_step") or 1)
    only_dense = set(config.get("mlp_only_layers") or ())
    moe = tuple(n for n in layers if n >= dense and n not in only_dense and (n + 1) % step == 0)
    if not moe:
        return 0, 0, ()
    return experts, _required(config, "num_experts_per_tok", "the model"), moe


def _eos(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    generation = folder / "generation_config.json"
    for source in (_json(generation) if generation.exists() else {}, config):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(found))


def _headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ContractError("model", f"{folder} holds no *.safetensors")
    index = folder / "model.safetensors.index.json"
    listed = set(_json(index)["weight_map"]) if index.exists() else None
    tensors = {}
    for file in files:
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LARGEST_HEADER:
                raise ContractError("model", f"{file} is no safetensors file")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__" and (listed is None or name in listed):
                tensors[name] = (entry["dtype"], tuple(entry["shape"]))
    if listed is not None and (lost := sorted(listed - set(tensors))):
        raise ContractError("model", f"{index} lists {lost[0]!r}, which no file of {folder} holds")
    return tensors


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ContractError("model", f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ContractError("model", f"{path} is not JSON: {error}") from None


def _required(config: Mapping[str, Any], key: str, where: object) -> Any:
    if config.get(key) is None:
        raise ContractError("model", f"config.json of {where} lacks {key!r}")
    return config[key]
