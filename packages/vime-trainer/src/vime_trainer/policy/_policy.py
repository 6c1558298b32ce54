"""A language model that is trained: log-probabilities of packed batches, and its weights under Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from vime_trainer import megatron, models
from vime_trainer.packed import PackedBatch, TokenOutputs
from vime_trainer.policy._gather import gather_rows
from vime_trainer.policy._layouts import Prepared
from vime_trainer.policy._logprobs import token_logprobs
from vime_trainer.policy._transformer import Layout, Transformer

__all__ = ["Policy"]


class Policy(Transformer):
    """Made by `from_hf` or `from_config`; attributes as of Transformer."""

    @classmethod
    def from_hf(
        cls,
        folder: str | Path,
        dtype: str = "float32",
        layout: Layout = "packed",
        recompute: bool = False,
        replay: bool = False,
        parallel: megatron.ParallelConfig | None = None,
        transformer_engine: megatron.TransformerEngine = "auto",
    ) -> Policy:
        """Reads a Hugging Face folder: config.json and safetensors files. Collective.

        Args:
            folder: the folder.
            dtype: "float32" or "bfloat16".
            layout: "packed", or "padded" to the longest sequence of each batch; the results are the same.
            recompute: keep only each layer's input for the backward pass.
            replay: make the routers replay routes that a batch brings.
            parallel: how it is spread over ranks; default as `megatron.parallel` says.
            transformer_engine: whether its layers are used: "auto" where it is installed, for bfloat16 models without
                experts on a GPU; "on" or "off".

        Raises:
            FileNotFoundError: no config.json or no safetensors file.
            ValueError: an unsupported model, a layout that does not fit it, tensors that are missing, extra or of another
                shape, or Transformer Engine asked for where it cannot be used; names the first.
        """
        folder = Path(folder)
        policy = cls(models.read_config(folder), dtype, layout, recompute, folder, parallel, transformer_engine)
        policy.load_hf(folder)
        if replay:
            policy.attach_replay()
        return policy

    @classmethod
    def from_config(
        cls,
        path: str | Path,
        dtype: str = "float32",
        seed: int = 0,
        layout: Layout = "packed",
        parallel: megatron.ParallelConfig | None = None,
        transformer_engine: megatron.TransformerEngine = "auto",
    ) -> Policy:
        """A model with random weights: normal with the config's initializer_range, norms 1.

        Args:
            path: config.json or the folder that holds it.
            seed: weights depend on it and on their names alone.
        """
        policy = cls(models.read_config(path), dtype, layout, False, None, parallel, transformer_engine)
        policy.randomize(seed)
        return policy

    def run(
        self,
        batches: Sequence[PackedBatch],
        wanted: Sequence[Tensor | None],
        loss: Callable[[int, TokenOutputs], Tensor] | None = None,
    ) -> list[TokenOutputs]:
        """One pass over micro-batches by Megatron's schedule: forward, and backward where there is a loss. Collective.

        Every rank of a model replica gives the same batches, every data-parallel rank the same number of them.

        Args:
            batches: at least one.
            wanted: of each batch bool [T], as in `forward`.
            loss: called on ranks of the last stage alone with the number of the batch and its outputs; returns a scalar.
                Losses add up over batches and data-parallel ranks, nothing is averaged, so it carries its own global
                weights. Without it there is no backward pass and no gradient.

        Returns:
            On the last stage the detached outputs of each batch, on every tensor- and context-parallel rank those of all
            its tokens; elsewhere nothing.

        Raises:
            ValueError: as `forward`, or numbers of batches that differ between ranks.
        """
        return self._run(batches, wanted, self._outputs, loss)

    def forward(self, batch: PackedBatch, wanted: Tensor | None = None) -> TokenOutputs:
        """Log-probability and entropy of each token given those before it in its sequence; differentiable.

        Logits are divided by the batch's temperature in float32. Call it under torch.no_grad() for values alone.

        Args:
            batch: T tokens, on any device.
            wanted: bool [T]; tokens that are false get 0 and cost no logits. Default: all but first tokens.

        Returns:
            float32 [T] on the model's device; first tokens of sequences have 0.

        Raises:
            ValueError: token ids beyond the vocabulary, routes without replay, or a model with pipeline stages.
        """
        return self._once(batch, wanted, self._outputs)

    __call__ = forward

    def _outputs(self, item: Prepared, hidden: Tensor) -> TokenOutputs:
        here = self.parallel
        group = None
        if here.tensor_size > 1:
            # Each rank's part of the vocabulary gives a part of the gradient of the hidden states.
            whole = gather_from_sequence_parallel_region if here.config.shares_tokens else _copied
            hidden, group = whole(hidden), parallel_state.get_tensor_model_parallel_group()
        weight = megatron.head_weight(self.chunks[-1])
        first = here.tensor_rank * weight.size(0)
        logprobs, entropy = token_logprobs(
            hidden[item.sources],
            weight[: max(0, self.arch.vocab - first)],
            item.targets,
            item.temperature,
            group=group,
            first=first,
        )
        if here.context_size > 1:
            both = torch.stack((logprobs, entropy), dim=1)
            both = gather_rows(both, item.counts, here.context_rank, parallel_state.get_context_parallel_group())
            logprobs, entropy = both.unbind(1)
        zeros = logprobs.new_zeros(item.total)
        return TokenOutputs(zeros.index_copy(0, item.places, logprobs), zeros.index_copy(0, item.places, entropy))


def _copied(hidden: Tensor) -> Tensor:
    return copy_to_tensor_model_parallel_region(hidden)
