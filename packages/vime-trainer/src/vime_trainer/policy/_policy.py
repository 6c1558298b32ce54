"""A language model that is trained: log-probabilities of packed batches, and its weights under Hugging Face names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vime_proto.errors import nearest
from vime_trainer import megatron, models
from vime_trainer.packed import PackedBatch, TokenOutputs
from vime_trainer.policy._layouts import Prepared, prepare
from vime_trainer.policy._logprobs import token_logprobs

__all__ = ["DTYPES", "Policy"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Layout = Literal["packed", "padded"]


class Policy:
    """Made by `from_hf` or `from_config`.

    Attributes:
        model: Megatron's GPTModel; the optimizer wraps it for gradient accumulation.
        arch: its sizes.
        config: contents of config.json, as given.
        folder: the Hugging Face folder that it came from; None when made from a config alone.
        device: where it lives.
        dtype: of its weights and activations.
        replay: vime_r3.megatron.Replay once attached.
    """

    def __init__(
        self, config: models.HfConfig, dtype: str, layout: Layout, recompute: bool, folder: Path | None = None
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype: {nearest(dtype, DTYPES)}")
        if layout not in ("packed", "padded"):
            raise ValueError(f"layout: {nearest(layout, ['packed', 'padded'])}")
        self.family = models.family_of(config)
        self.arch = self.family.architecture(config)
        self.config = config.values
        self.folder = folder
        self.dtype = DTYPES[dtype]
        self.layout = layout
        self.model = megatron.build_model(self.arch, self.dtype, recompute)
        self.device = megatron.device()
        self.replay: Any = None
        self._entries = models.expand(self.family.weights, self.arch)
        models.check_names({entry.megatron for entry in self._entries}, self.weights(), "weight table")
        self._specs = models.specs(self._entries)

    @classmethod
    def from_hf(
        cls,
        folder: str | Path,
        dtype: str = "float32",
        layout: Layout = "packed",
        recompute: bool = False,
        replay: bool = False,
    ) -> Policy:
        """Reads a Hugging Face folder: config.json and safetensors files.

        Args:
            folder: the folder.
            dtype: "float32" or "bfloat16".
            layout: "packed", or "padded" to the longest sequence of each batch; the results are the same.
            recompute: keep only each layer's input for the backward pass (GPU only).
            replay: make the routers replay routes that a batch brings.

        Raises:
            FileNotFoundError: no config.json or no safetensors file.
            ValueError: an unsupported model, or tensors that are missing, extra or of another shape; names the first.
        """
        folder = Path(folder)
        policy = cls(models.read_config(folder), dtype, layout, recompute, folder)
        policy.load_hf(folder)
        if replay:
            policy.attach_replay()
        return policy

    @classmethod
    def from_config(cls, path: str | Path, dtype: str = "float32", seed: int = 0, layout: Layout = "packed") -> Policy:
        """A model with random weights: normal with the config's initializer_range, norms 1.

        Args:
            path: config.json or the folder that holds it.
            seed: weights depend on it and on their names alone.
        """
        policy = cls(models.read_config(path), dtype, layout, recompute=False)
        std = policy.arch.init_std

        def read(name: str, box: models.Box) -> Tensor:
            return models.random_tensor(name, policy._specs[name], std, seed, policy.dtype)[box]

        models.fill(policy._entries, policy.weights(), policy.arch, read)
        return policy

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Megatron's parameters by name, tied ones once."""
        return dict(self.model.named_parameters())

    def weights(self) -> dict[str, Tensor]:
        """All that belongs in a folder or an update, by Megatron's name: parameters, and what training leaves as it is."""
        return megatron.weights(self.model)

    def load_hf(self, folder: str | Path) -> None:
        """Replaces all weights by those of another folder of the same architecture.

        An optimizer that exists must be told by its `reload_weights`.

        Raises:
            FileNotFoundError, ValueError: as from_hf.
        """
        files = models.WeightFiles(folder)
        models.check_names(files.names - models.ignored(files.names, self.arch), self._specs, str(folder))
        files.check_shapes(self._specs)
        models.fill(self._entries, self.weights(), self.arch, files.read)

    def forward(self, batch: PackedBatch, wanted: Tensor | None = None) -> TokenOutputs:
        """Log-probability and entropy of each token given those before it in its sequence.

        Logits are divided by the batch's temperature in float32. Call it under torch.no_grad() for values alone.

        Args:
            batch: T tokens, on any device.
            wanted: bool [T]; tokens that are false get 0 and cost no logits. Default: all but first tokens.

        Returns:
            float32 [T] on the model's device; first tokens of sequences have 0.

        Raises:
            ValueError: token ids beyond the vocabulary, or routes without replay.
        """
        prepared = prepare(batch, wanted, self.device, self.dtype, padded=self.layout == "padded")
        if prepared.highest >= self.arch.vocab or prepared.lowest < 0:
            shown = f"{prepared.lowest} to {prepared.highest}"
            raise ValueError(f"tokens: ids from {shown}; valid: 0 to {self.arch.vocab - 1}")
        with self._replaying(prepared) as usage:
            hidden = self.model(prepared.tokens, prepared.positions, prepared.layout)
        logprobs, entropy = token_logprobs(
            hidden[prepared.sources],
            megatron.head_weight(self.model),
            prepared.targets,
            prepared.temperature,
        )
        zeros = logprobs.new_zeros(batch.total)
        place = prepared.places
        return TokenOutputs(zeros.index_copy(0, place, logprobs), zeros.index_copy(0, place, entropy), usage)

    __call__ = forward

    def hf_specs(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every Hugging Face tensor in the order of `hf_tensors`; reads no weights."""
        return dict(self._specs)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and tensors, layer by layer, as views of the live weights where layouts agree.

        Copy what must survive the next optimizer step. All experts of a layer come one after the other.
        """
        return models.export(self._entries, self.weights(), self.arch)

    def save_hf(self, folder: str | Path, side_files: str | Path | None = None, max_shard_bytes: int = 4 << 30) -> Path:
        """Writes a folder that transformers and vLLM load: weights, config.json, and tokenizer files.

        The folder appears whole or not at all; one that exists is replaced.

        Args:
            folder: where to.
            side_files: folder whose tokenizer and other small files are copied; default: where the model came from.
            max_shard_bytes: most bytes of weights in one file.
        """
        config = self.config | {key: value for key, value in self.family.exported.items() if key in self.config}
        name = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        config["dtype" if "torch_dtype" not in config else "torch_dtype"] = name
        source = side_files if side_files is not None else self.folder
        return models.write_folder(
            folder, self.hf_tensors(), models.tensor_specs(self._entries, self.dtype), config, source, max_shard_bytes
        )

    def router_modules(self) -> dict[int, Any]:
        """Megatron's TopKRouter modules by global layer number, counted from 0."""
        return megatron.routers(self.model)

    def attach_replay(self) -> Any:
        """Makes the routers replay routes that a batch brings; returns the vime_r3.megatron.Replay.

        Raises:
            ValueError: a model without MoE layers.
        """
        if not self.arch.moe_layers:
            raise ValueError(f"replay: {self.family.name} has no MoE layers, so there are no routes to replay")
        if self.replay is None:
            from vime_r3.megatron import attach

            self.replay = attach(self.model)
        return self.replay

    def describe(self) -> str:
        """One line for logs."""
        count = sum(param.numel() for param in self.parameters().values())
        sizes = {"layers": self.arch.layers, "hidden": self.arch.hidden, "vocab": self.arch.vocab}
        return f"{self.family.name} {count:,} parameters {json.dumps(sizes)} {self.dtype} on {self.device}"

    def _replaying(self, prepared: Prepared) -> AbstractContextManager[Any]:
        routes = prepared.routes
        if routes is None:
            return nullcontext()
        if self.replay is None:
            raise ValueError("routes: the batch brings routes, but this policy does not replay; call attach_replay()")
        return self.replay.use(routes.ids, routes.valid, layer_ids=routes.layer_ids, measure=routes.measure)
