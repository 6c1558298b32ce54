"""The receiving end of a weight update inside vLLM's worker: chunks that lie in mapped files become weights of the model.

The layerwise reload keeps references to the tensors that it is given until their module is complete, and copies them then. So
mappings stay open until the update ends, and a module that needs several tensors gets them all at once.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from vime_rollout.engine._model import update_groups
from vime_rollout.engine.backend import _reload


@dataclasses.dataclass
class VimeInit(WeightTransferInitInfo):
    """Nothing: files are named with every chunk."""


@dataclasses.dataclass
class VimeChunk(WeightTransferUpdateInfo):
    """One chunk.

    Attributes:
        path: file that holds the chunk's bytes.
        fills: see ``vime_rollout.engine._plan.Fill``, as lists.
        names: in the first chunk of an update, the names of all its tensors.
        clear_cache: instead of a chunk: overwrite the KV cache with zeros.
    """

    path: str = ""
    fills: list[list[Any]] = dataclasses.field(default_factory=list)
    names: list[str] | None = None
    clear_cache: bool = False


class VimeTransfer(WeightTransferEngine[VimeInit, VimeChunk]):
    """Registered with vLLM under the name "vime"."""

    init_info_cls = VimeInit
    update_info_cls = VimeChunk
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clear()

    def _clear(self) -> None:
        self._saved: _reload.Saved | None = None
        self._groups: dict[str, str] = {}
        self._left: dict[str, int] = {}  # tensors that a module still lacks
        self._held: dict[str, list[tuple[str, torch.Tensor]]] = {}  # tensors of modules that are not complete
        self._parts: dict[str, tuple[torch.Tensor, int]] = {}  # tensors under assembly, and bytes still lacking
        self._pieces: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}  # pieces cut by a chunk's end

    def init_transfer_engine(self, init_info: VimeInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Forgets the last update; the model is touched by the first chunk only."""
        self._clear()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads one chunk. When it fails, the model is left usable by the next full update."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.finish_weight_update()
            raise
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: VimeChunk) -> None:
        """Maps a chunk and gives the model every module that it completes."""
        if update_info.clear_cache:
            _reload.zero_caches(self.vllm_config.compilation_config.static_forward_context.values())
            return
        if update_info.names is not None:
            self._groups = update_groups(update_info.names)
            self._left = {group: 0 for group in self._groups.values()}
            for group in self._groups.values():
                self._left[group] += 1
        # Older workers do not set the configuration that expert layers ask for while they pack.
        with set_current_vllm_config(self.vllm_config):
            self._load(update_info)

    def _load(self, update_info: VimeChunk) -> None:
        if self._saved is None:
            self._saved = _reload.before(self.model)
            initialize_layerwise_reload(self.model)
        ready: list[tuple[str, torch.Tensor]] = []
        for name, tensor in self._tensors(_map(update_info.path), update_info.fills):
            group = self._groups[name]
            held = self._held.setdefault(group, [])
            held.append((name, tensor))
            if len(held) == self._left[group]:
                ready += self._held.pop(group)
        if ready:
            with _reload.partial_load():
                self.model.load_weights(ready)

    def finish_weight_update(self) -> None:
        """Ends the update, complete or not: modules that got nothing keep their weights."""
        saved = self._saved
        self._clear()
        if saved is not None:
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(self.model, self.model_config)
                _reload.after(self.model, saved)

    def shutdown(self) -> None:
        """Drops what is held."""
        self._clear()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Asked for by vLLM before 0.28; the sender is a vime trainer, which needs no vLLM."""
        raise NotImplementedError("weights are sent through EngineControlService")

    def _tensors(self, data: torch.Tensor, fills: list[list[Any]]):
        for name, dtype_name, shape, start, extent, piece_bytes, piece_offset, offset, length in fills:
            dtype = getattr(torch, dtype_name)
            part = data[offset : offset + length]
            if length == piece_bytes:
                piece = _typed(part, dtype, extent or shape)
            else:
                key = (name, tuple(start))
                buffer = self._pieces.setdefault(key, torch.empty(piece_bytes, dtype=torch.uint8))
                buffer[piece_offset : piece_offset + length] = part
                if piece_offset + length < piece_bytes:
                    continue
                piece = self._pieces.pop(key).view(dtype).reshape(extent or shape)
            if not start or list(extent) == list(shape):
                yield name, piece
                continue
            whole, lacking = self._parts.get(name) or (
                torch.empty(shape, dtype=dtype),
                math.prod(shape) * dtype.itemsize,
            )
            whole[tuple(slice(low, low + count) for low, count in zip(start, extent, strict=True))] = piece
            if lacking > piece_bytes:
                self._parts[name] = (whole, lacking - piece_bytes)
                continue
            self._parts.pop(name, None)
            yield name, whole


def _map(path: str) -> torch.Tensor:
    """The bytes of a file: uint8 [n]. Pages are shared with the writer; the mapping lives as long as a tensor views it."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        # A private mapping is writable for torch, yet never written.
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _typed(part: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).reshape(shape)
