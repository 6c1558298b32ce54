"""A value model: the same transformer as a policy, with a head of one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vime_trainer import megatron, models
from vime_trainer.packed import PackedBatch
from vime_trainer.policy import Transformer
from vime_trainer.policy._gather import gather_rows
from vime_trainer.policy._layouts import Prepared
from vime_trainer.value._head import HEAD, attach_head, table_with_head, untied

__all__ = ["ValueModel", "ValueOutputs"]


@dataclass(frozen=True)
class ValueOutputs:
    """What a pass says of each token.

    Attributes:
        values: float32 [T], value of the prefix before token i; 0 for first tokens of sequences and unwanted ones.
        usage: None; a critic routes itself.
    """

    values: Tensor
    usage: Any = None


class ValueModel(Transformer):
    """Made by `from_hf`; attributes as of Transformer. Temperatures do not matter to it."""

    @classmethod
    def from_hf(
        cls,
        folder: str | Path,
        dtype: str = "float32",
        layout: str = "packed",
        recompute: bool = False,
        parallel: megatron.ParallelConfig | None = None,
        head_std: float = 0.0,
        seed: int = 0,
        transformer_engine: megatron.TransformerEngine = "auto",
    ) -> ValueModel:
        """Reads a Hugging Face folder of a language model, or one that `save_hf` wrote. Collective.

        Args:
            folder: the folder; a language model's head over the vocabulary is left out.
            dtype, layout, recompute, parallel, transformer_engine: as in `Policy.from_hf`.
            head_std: deviation of the head's random weights where the folder has none; 0 makes them 0.
            seed: of those.

        Raises:
            FileNotFoundError, ValueError: as `Policy.from_hf`.
        """
        folder = Path(folder)
        model = cls(models.read_config(folder), dtype, layout, recompute, folder, parallel, transformer_engine)
        model._head_start = (head_std, seed)
        model.load_hf(folder)
        return model

    def load_hf(self, folder: str | Path) -> None:
        """Replaces all weights by a folder's; its head, too, if it has a value head.

        Raises:
            FileNotFoundError, ValueError: as `Transformer.load_hf`.
        """
        files = models.WeightFiles(folder)
        spare = models.ignored(files.names, self.arch) | {"lm_head.weight"}
        specs = dict(self._specs) if HEAD in files.names else {n: s for n, s in self._specs.items() if n != HEAD}
        models.check_names(files.names - spare, specs, str(folder))
        files.check_shapes(specs)

        def read(name: str, box: models.Box) -> Tensor:
            return files.read(name, box) if name in specs else self._new_head()[box]

        self._fill(read)

    def run(
        self,
        batches: Sequence[PackedBatch],
        wanted: Sequence[Tensor | None],
        loss: Callable[[int, ValueOutputs], Tensor] | None = None,
    ) -> list[ValueOutputs]:
        """One pass over micro-batches, forward, and backward where there is a loss; as `Policy.run`. Collective."""
        return self._run(batches, wanted, self._outputs, loss)

    def forward(self, batch: PackedBatch, wanted: Tensor | None = None) -> ValueOutputs:
        """Values of one batch, differentiable; only without pipeline stages. As `Policy.forward`."""
        return self._once(batch, wanted, self._outputs)

    __call__ = forward

    def _outputs(self, item: Prepared, hidden: Tensor) -> ValueOutputs:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        here = self.parallel
        if here.config.shares_tokens:
            # Each rank computes all values, so its gradient is whole already: it is cut, not added up.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        values = self.chunks[-1].output_layer(hidden[item.sources])
        if here.context_size > 1:
            group = parallel_state.get_context_parallel_group()
            values = gather_rows(values, item.counts, here.context_rank, group)
        return ValueOutputs(values.new_zeros(item.total).index_copy(0, item.places, values))

    def _new_head(self) -> Tensor:
        std, seed = self._head_start
        if std == 0.0:
            return torch.zeros(self._specs[HEAD], dtype=self.dtype)
        return models.random_tensor(HEAD, self._specs[HEAD], std, seed, self.dtype)

    def _architecture(self, config: models.HfConfig) -> models.Architecture:
        # One label, so that transformers reads an exported folder as a model that scores sequences.
        config.values |= {"num_labels": 1, "id2label": {"0": "value"}, "label2id": {"value": 0}}
        config.values["architectures"] = [
            name.replace("ForCausalLM", "ForSequenceClassification") for name in self.family.architectures
        ]
        return untied(self.family.architecture(config))

    def _build(self, recompute: bool, transformer_engine: megatron.TransformerEngine) -> list[Any]:
        chunks = megatron.build_chunks(self.arch, self.dtype, recompute, transformer_engine)
        attach_head(chunks, self.arch, self.dtype)
        return chunks

    def _weight_table(self) -> list[models.Entry]:
        return table_with_head(self.family.weights, self.arch)
