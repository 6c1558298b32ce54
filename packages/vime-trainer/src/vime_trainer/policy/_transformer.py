"""A transformer spread over ranks: built, filled from and exported to Hugging Face folders, run over micro-batches."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vime_proto.errors import nearest
from vime_trainer import megatron, models
from vime_trainer.packed import PackedBatch, RecordRows, ReplayRows, pack
from vime_trainer.policy import _usage
from vime_trainer.policy._layouts import Cut, Prepared, agreed_lengths, prepare, routed_tokens, stream_length
from vime_trainer.policy._names import TIED_HEAD, find_holders, globally, own_entries
from vime_trainer.policy._record import gather_choice
from vime_trainer.policy._schedule import run_schedule

__all__ = ["DTYPES", "Layout", "Transformer"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Layout = Literal["packed", "padded"]


class Transformer:
    """This rank's part of a model, without what is made of its last hidden states: `Policy` has that.

    Attributes:
        parallel: the layout that it was built for.
        chunks: Megatron's models of this rank: one, or one for each virtual pipeline stage.
        layers: global numbers of this rank's decoder layers, ascending.
        arch: sizes of the whole model.
        config: contents of config.json, as given.
        folder: the Hugging Face folder that it came from; None when made from a config alone.
        device: where it lives.
        dtype: of its weights and activations.
        replays: a vime_r3.megatron.Replay for each chunk once attached, else empty.
        recorded: after a pass over batches with RecordRows the routes of each, of this rank's layers, to be replayed in
            another pass; None for the others.
    """

    def __init__(
        self,
        config: models.HfConfig,
        dtype: str,
        layout: Layout,
        recompute: bool,
        folder: Path | None = None,
        parallel: megatron.ParallelConfig | None = None,
        transformer_engine: megatron.TransformerEngine = "auto",
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype: {nearest(dtype, DTYPES)}")
        if layout not in ("packed", "padded"):
            raise ValueError(f"layout: {nearest(layout, ['packed', 'padded'])}")
        self.family = models.family_of(config)
        self.arch = self._architecture(config)
        self.config = config.values
        self.folder = folder
        self.dtype = DTYPES[dtype]
        self.layout = layout
        self.parallel = megatron.initialize(parallel)
        self.chunks = self._build(recompute, transformer_engine)
        self.layers = tuple(sorted(layer.layer_number - 1 for chunk in self.chunks for layer in chunk.decoder.layers))
        self.device = megatron.device()
        self.replays: list[Any] = []
        self.recorded: list[ReplayRows | None] = []
        self._recompute = recompute
        self._table = self._weight_table()
        self._specs = models.specs(self._table)
        self._entries = own_entries(self._table, list(self.weights()), self.parallel)
        self._holders = find_holders(self._table, list(self.weights()), self.parallel)
        self._cut = Cut.of(self.parallel)

    @property
    def model(self) -> Any:
        """The first chunk; the whole model in one process."""
        return self.chunks[0]

    @property
    def replay(self) -> Any:
        """The first chunk's replay; None before `attach_replay`."""
        return self.replays[0] if self.replays else None

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Megatron's parameters of this rank by its name with global layer numbers, tied ones once a rank."""
        return self._by_name(lambda chunk: dict(chunk.named_parameters()))

    def weights(self) -> dict[str, Tensor | models.PerExpert]:
        """All that belongs in a folder or an update, by the names of the weight table, with global layer numbers.

        These are the parameters, and what training leaves as it is. A model of Transformer Engine's layers has the same
        names as any other; its experts' weights are views of several parameters each.
        """
        return models.table_weights(self._by_name(megatron.weights))

    def load_hf(self, folder: str | Path) -> None:
        """Replaces all weights by those of another folder of the same architecture; each rank reads only its part.

        An optimizer that exists must be told by its `reload_weights`.

        Raises:
            FileNotFoundError: no safetensors file.
            ValueError: tensors that are missing, extra or of another shape; names the first.
        """
        files = models.WeightFiles(folder)
        models.check_names(files.names - models.ignored(files.names, self.arch), self._specs, str(folder))
        files.check_shapes(self._specs)
        self._fill(files.read)

    def randomize(self, seed: int) -> None:
        """Random weights: normal with the config's initializer_range, norms 1. The same for every layout."""
        std = self.arch.init_std

        def read(name: str, box: models.Box) -> Tensor:
            return models.random_tensor(name, self._specs[name], std, seed, self.dtype)[box]

        self._fill(read)

    def hf_specs(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every Hugging Face tensor in the order of `hf_tensors`; reads no weights."""
        return dict(self._specs)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors, layer by layer. Collective: every rank must iterate to the end.

        Rank 0 gets them, one Megatron parameter at a time; the other ranks get nothing. In one process they are views of
        the live weights where layouts agree: copy what must survive the next optimizer step. All experts of a layer come
        one after the other.
        """
        found, here = self.weights(), self.parallel
        for entry, holders in zip(self._table, self._holders, strict=True):
            if here.is_leader:
                parts = [self._receive(entry, rank, found) for rank in holders]
                yield from zip(entry.hf, models.join(entry, parts, self.arch, here.place), strict=True)
            elif here.rank in holders:
                dist.send(found[entry.megatron].detach().contiguous(), 0)

    def save_hf(self, folder: str | Path, side_files: str | Path | None = None, max_shard_bytes: int = 4 << 30) -> Path:
        """Writes a folder that transformers and vLLM load: weights, config.json, and tokenizer files. Collective.

        Rank 0 writes. The folder appears whole or not at all; one that exists is replaced.

        Args:
            folder: where to.
            side_files: folder whose tokenizer and other small files are copied; default: where the model came from.
            max_shard_bytes: most bytes of weights in one file.
        """
        if not self.parallel.is_leader:
            for _ in self.hf_tensors():
                raise AssertionError("only rank 0 gets tensors")
            self.parallel.barrier()
            return Path(folder)
        config = self.config | {key: value for key, value in self.family.exported.items() if key in self.config}
        name = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        config["dtype" if "torch_dtype" not in config else "torch_dtype"] = name
        source = side_files if side_files is not None else self.folder
        written = models.write_folder(
            folder, self.hf_tensors(), models.tensor_specs(self._table, self.dtype), config, source, max_shard_bytes
        )
        self.parallel.barrier()
        return written

    def sharded_state_dict(self, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """Megatron's sharded tensors of this rank, by "model" or "model0", "model1", ... for virtual stages."""
        if len(self.chunks) == 1:
            return {"model": self.model.sharded_state_dict(metadata=metadata)}
        return {f"model{number}": one.sharded_state_dict(metadata=metadata) for number, one in enumerate(self.chunks)}

    def router_modules(self) -> dict[int, Any]:
        """Megatron's TopKRouter modules of this rank by global layer number, counted from 0."""
        return {number: router for chunk in self.chunks for number, router in megatron.routers(chunk).items()}

    def attach_replay(self) -> Any:
        """Makes the routers replay routes that a batch brings; returns the first chunk's vime_r3.megatron.Replay.

        Raises:
            ValueError: a model without MoE layers.
        """
        if not self.arch.moe_layers:
            raise ValueError(f"replay: {self.family.name} has no MoE layers, so there are no routes to replay")
        if not self.replays:
            from vime_r3.megatron import attach

            self.replays = [attach(chunk) for chunk in self.chunks]
        return self.replay

    def routed_tokens(self, micro_batches: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Which tokens this rank's routers see in one pass over micro-batches, before there are any. Collective as `run`.

        Args:
            micro_batches: of each, the lengths of its sequences.

        Returns:
            int64 places of tokens in each packed batch, in no order; none on a rank without MoE layers.
        """
        lengths = self._stream_lengths(micro_batches)[: len(micro_batches)]
        if not set(self.layers) & set(self.arch.moe_layers):
            return [np.zeros(0, np.int64) for _ in micro_batches]
        padded = self.layout == "padded"
        found = [
            routed_tokens(one, padded, self._cut, length) for one, length in zip(micro_batches, lengths, strict=True)
        ]
        return [places[places >= 0] for places in found]

    def describe(self) -> str:
        """One line for logs."""
        count = sum(param.numel() for param in self.parameters().values())
        sizes = {"layers": self.arch.layers, "hidden": self.arch.hidden, "vocab": self.arch.vocab}
        where = f"{self.dtype} on {self.device}"
        if self.model.transformer_engine:
            where += " by Transformer Engine"
        if self.parallel.world > 1:
            where += f", rank {self.parallel.rank} of {self.parallel.world}"
        return f"{self.family.name} {count:,} parameters {json.dumps(sizes)} {where}"

    # What a model with another head changes.

    def _architecture(self, config: models.HfConfig) -> models.Architecture:
        return self.family.architecture(config)

    def _build(self, recompute: bool, transformer_engine: megatron.TransformerEngine) -> list[Any]:
        return megatron.build_chunks(self.arch, self.dtype, recompute, transformer_engine)

    def _weight_table(self) -> list[models.Entry]:
        return models.expand(self.family.weights, self.arch)

    def _run(
        self,
        batches: Sequence[PackedBatch],
        wanted: Sequence[Tensor | None],
        head: Callable[[Prepared, Tensor], Any],
        loss: Callable[[int, Any], Tensor] | None,
    ) -> list[Any]:
        """One pass over all micro-batches; see `Policy.run`. `head` makes the outputs from hidden states [M, hidden]."""
        if not batches or len(batches) != len(wanted):
            raise ValueError(
                f"batches: {len(batches)} with {len(wanted)} masks; need at least one, and a mask for each"
            )
        items = self._prepare(batches, wanted)
        usages: list[list[Any]] = [[] for _ in items]
        choices: list[list[Any]] = [[] for _ in items]
        outputs: list[Any] = [None] * len(batches)

        def forward(chunk: int, index: int, item: Prepared) -> Tensor:
            with self._replaying(chunk, item) as usage:
                hidden = self.chunks[chunk](item.tokens, item.positions, item.layout)
            if isinstance(item.routes, RecordRows):
                choices[index].append((self.replays[chunk].layer_ids, usage))
            elif usage is not None:
                usages[index].append(usage)
            return hidden

        def finish(index: int, item: Prepared, hidden: Tensor) -> Tensor | None:
            if index >= len(batches):
                return None
            result = head(item, hidden.squeeze(1))
            value = None if loss is None else loss(index, result)
            outputs[index] = _detached(result)
            return value

        run_schedule(self.chunks, items, forward, finish, backward=loss is not None)
        if loss is not None:
            for usage in (usage for of_batch in usages for usage in of_batch):
                usage.check_recomputed(self._recompute)
        self._keep(choices[: len(batches)], items)
        total = _usage.combine(usages[: len(batches)], items, sorted(self.arch.moe_layers), self.parallel)
        if not self.parallel.is_last_stage:
            return []
        return [dataclasses.replace(one, usage=usage) for one, usage in zip(outputs, total, strict=True)]

    def _once(self, batch: PackedBatch, wanted: Tensor | None, head: Callable[[Prepared, Tensor], Any]) -> Any:
        """The outputs of one batch, differentiable; only without pipeline stages."""
        if len(self.chunks) > 1 or self.parallel.pipeline_size > 1:
            raise ValueError("forward: needs a model without pipeline stages; use run")
        (item,) = self._prepare([batch], [wanted])
        with self._replaying(0, item) as usage:
            hidden = self.model(item.tokens, item.positions, item.layout)
        record = isinstance(item.routes, RecordRows)
        self._keep([[(self.replay.layer_ids, usage)] if record else []], [item])
        (total,) = _usage.combine(
            [[] if usage is None else [usage]], [item], sorted(self.arch.moe_layers), self.parallel
        )
        return dataclasses.replace(head(item, hidden.squeeze(1)), usage=total)

    def _prepare(self, batches: Sequence[PackedBatch], wanted: Sequence[Tensor | None]) -> list[Prepared]:
        lengths = self._stream_lengths([batch.lengths for batch in batches])
        fillers = len(lengths) - len(batches)
        batches, wanted = [*batches, *(pack([[0]]) for _ in range(fillers))], [*wanted, *[None] * fillers]
        padded = self.layout == "padded"
        shared = (self.device, self.dtype, padded, self.arch.vocab, self._cut)
        return [
            prepare(batch, mask, *shared, length) for batch, mask, length in zip(batches, wanted, lengths, strict=True)
        ]

    def _stream_lengths(self, micro_batches: Sequence[Sequence[int]]) -> list[int]:
        """Tokens of each micro-batch of a pass with padding, and of those that fill the last round. Collective."""
        config = self.parallel.config
        cuts = list(micro_batches)
        # The interleaved schedule takes whole rounds; a batch without an output fills the last one.
        while config.virtual > 1 and len(cuts) % config.pipeline:
            cuts.append([1])
        lengths = [stream_length(cut, self.layout == "padded", self._cut) for cut in cuts]
        if config.expert * config.expert_tensor > 1:
            # The all-to-all dispatcher takes any lengths.
            free = self.device.type == "cuda" and config.expert > 1
            lengths = agreed_lengths(lengths, self.parallel, free)
        if config.virtual > 1:
            lengths = [max(lengths)] * len(lengths)
        return lengths

    def _keep(self, choices: list[list[Any]], items: list[Prepared]) -> None:
        self.recorded = [
            gather_choice(found, item, self.arch.experts, self.arch.top_k, self.parallel)
            if isinstance(item.routes, RecordRows)
            else None
            for found, item in zip(choices, items, strict=False)
        ]

    def _replaying(self, chunk: int, item: Prepared) -> AbstractContextManager[Any]:
        routes = item.routes
        if routes is None:
            return nullcontext()
        if not self.replays:
            raise ValueError("routes: the batch brings routes, but this policy does not replay; call attach_replay()")
        if isinstance(routes, RecordRows):
            return self.replays[chunk].record()
        return self.replays[chunk].use(
            routes.ids,
            routes.valid,
            layer_ids=routes.layer_ids,
            measure=routes.measure,
            exact=routes.exact,
            unread=item.unread,
        )

    def _fill(self, read: Callable[[str, models.Box], Tensor]) -> None:
        found, place = self.weights(), self.parallel.place
        models.fill(self._entries, found, self.arch, read, place)
        if TIED_HEAD in found and self.arch.tied:
            (embedding,) = [entry for entry in self._table if entry.megatron == "embedding.word_embeddings.weight"]
            models.fill([dataclasses.replace(embedding, megatron=TIED_HEAD)], found, self.arch, read, place)

    def _receive(self, entry: models.Entry, rank: int, found: dict[str, Tensor | models.PerExpert]) -> Tensor:
        if rank == self.parallel.rank:
            return found[entry.megatron].detach()
        shape = models.local_shape(entry, self.arch, self.parallel.place)
        dtype = torch.float32 if entry.float32 else self.dtype
        part = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(part, rank)
        return part

    def _by_name(self, get: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for chunk in self.chunks:
            found |= globally(chunk, get(chunk))
        return found


def _detached(outputs: Any) -> Any:
    values = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    return type(outputs)(
        **{name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
    )
