"""Where this process stands among all, and the small host-side exchanges between them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from vime_trainer.models import Place
from vime_trainer.settings.parallel import ParallelConfig

__all__ = ["Coordinates", "Parallel"]


@dataclass(frozen=True)
class Coordinates:
    """Place of one rank in every dimension."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    expert_data: int


class Parallel:
    """The layout in force. Made by `initialize`.

    Exchanges are collective: every rank named in their description must call them, in the same order.

    Attributes:
        config: the sizes.
        rank, world: this process and the number of all.
        data_rank, data_size: samples are split over these; ranks of one context-parallel group share theirs.
        tensor_rank, context_rank, pipeline_rank, expert_rank, expert_tensor_rank, and the same with _size: as named.
        coordinates: of every rank.
        is_leader: rank 0, which alone talks to other stages.
        is_last_stage: holds the output head.
    """

    def __init__(self, config: ParallelConfig, host: dist.ProcessGroup | None) -> None:
        state = parallel_state
        self.config = config
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.tensor_rank, self.tensor_size = state.get_tensor_model_parallel_rank(), config.tensor
        self.context_rank, self.context_size = state.get_context_parallel_rank(), config.context
        self.pipeline_rank, self.pipeline_size = state.get_pipeline_model_parallel_rank(), config.pipeline
        self.data_rank = state.get_data_parallel_rank(with_context_parallel=False)
        self.data_size = state.get_data_parallel_world_size(with_context_parallel=False)
        self.expert_rank, self.expert_size = state.get_expert_model_parallel_rank(), config.expert
        self.expert_tensor_rank = state.get_expert_tensor_parallel_rank()
        self.expert_tensor_size = config.expert_tensor
        self.is_leader = self.rank == 0
        self.is_last_stage = self.pipeline_rank == self.pipeline_size - 1
        self._host = host
        mine = Coordinates(
            self.tensor_rank,
            self.context_rank,
            self.data_rank,
            self.pipeline_rank,
            self.expert_rank,
            self.expert_tensor_rank,
            state.get_expert_data_parallel_rank(),
        )
        values = np.array(list(vars(mine).values()), dtype=np.int64)
        self.coordinates = tuple(Coordinates(*map(int, row)) for row in self.gather(values))

    @property
    def place(self) -> Place:
        """Which part of each weight this rank holds."""
        return Place(
            self.tensor_rank,
            self.tensor_size,
            self.expert_rank,
            self.expert_size,
            self.expert_tensor_rank,
            self.expert_tensor_size,
        )

    def broadcast(self, payload: bytes | None, source: int = 0) -> bytes:
        """The payload of rank `source`, on all ranks."""
        if self.world == 1:
            return _given(payload)
        length = torch.zeros(1, dtype=torch.int64)
        if self.rank == source:
            length[0] = len(_given(payload))
        dist.broadcast(length, source, group=self._host)
        content = _bytes(payload) if self.rank == source else torch.empty(int(length), dtype=torch.uint8)
        if int(length):
            dist.broadcast(content, source, group=self._host)
        return content.numpy().tobytes()

    def from_last_stage(self, payload: bytes | None) -> bytes:
        """The payload of this rank's last pipeline stage, on all stages."""
        if self.pipeline_size == 1:
            return _given(payload)
        stages = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        if self.is_last_stage:
            content = _bytes(_given(payload))
            for other in stages[:-1]:
                dist.send(torch.tensor([content.numel()]), other, group=self._host)
                if content.numel():
                    dist.send(content, other, group=self._host)
            return content.numpy().tobytes()
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, stages[-1], group=self._host)
        content = torch.empty(int(length), dtype=torch.uint8)
        if int(length):
            dist.recv(content, stages[-1], group=self._host)
        return content.numpy().tobytes()

    def sum_data(self, values: np.ndarray) -> np.ndarray:
        """float64 arrays of one shape, added up over the data-parallel ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.data_size > 1:
            dist.all_reduce(total, group=self._data_group())
        return total.numpy()

    def gather_data(self, values: np.ndarray) -> list[np.ndarray]:
        """1-d arrays of one dtype, by data-parallel rank; lengths may differ."""
        if self.data_size == 1:
            return [np.array(values)]
        return _gather(values, self._data_group(), self.data_size)

    def gather(self, values: np.ndarray, what: str = "") -> list[np.ndarray]:
        """1-d arrays of one dtype, by rank; lengths may differ.

        Args:
            values: of this rank.
            what: the same on all ranks.

        Raises:
            RuntimeError: another rank gathers something else, as after an error.
        """
        return [np.array(values)] if self.world == 1 else _gather(values, self._host, self.world, what)

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world > 1:
            dist.barrier(group=self._host)

    @staticmethod
    def _data_group() -> Any:
        return parallel_state.get_data_parallel_group_gloo(with_context_parallel=False)


def _given(payload: bytes | None) -> bytes:
    if payload is None:
        raise ValueError("payload: None on the rank that sends it")
    return bytes(payload)


def _bytes(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)


def _gather(values: np.ndarray, group: Any, size: int, what: str = "") -> list[np.ndarray]:
    values = np.ascontiguousarray(values)
    kind = zlib.crc32(f"{what} {values.dtype.str}".encode())
    heads = [torch.zeros(2, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(heads, torch.tensor([values.nbytes, kind]), group=group)
    if any(int(head[1]) != kind for head in heads):
        raise RuntimeError("ranks are not in step: one of them has failed, and says why")
    lengths = [head[0] for head in heads]
    longest = max(int(length) for length in lengths)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: values.nbytes] = _bytes(values.tobytes())
    found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    if longest:
        dist.all_gather(found, mine, group=group)
    return [
        np.frombuffer(one.numpy()[: int(length)].tobytes(), dtype=values.dtype)
        for one, length in zip(found, lengths, strict=True)
    ]
