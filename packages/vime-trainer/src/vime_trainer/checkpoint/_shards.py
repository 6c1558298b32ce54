"""Shards: one rank's parts of named tensors, as views of what it trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from vime_trainer.checkpoint._boxes import Box, cut

__all__ = ["Block", "Layout", "Shard"]


@dataclass(frozen=True)
class Shard:
    """A part of a tensor that this rank holds.

    Attributes:
        name: of the whole tensor, the same on all ranks.
        shape: of the whole tensor.
        box: where the part lies in it.
        data: a live view with the shape of the box.
        main: whether this rank writes the part; of its replicas exactly one does.
        flexible: the whole may have been stored with more or fewer rows (a vocabulary padded for other ranks).
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    data: Tensor
    main: bool = True
    flexible: bool = False


@dataclass(frozen=True)
class Block:
    """A box of a local tensor, and where it lies in the whole one."""

    local: Box
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How a rank's parameter lies in the whole one; its moments and master weights lie alike.

    Attributes:
        key: name of the whole parameter.
        shape: of the whole parameter.
        local: shape of this rank's, with as many axes as `shape`.
        blocks: its boxes; several where a rank holds rows that are not neighbours (gate and up projections).
        tensor: the parameter or buffer itself.
        first: whether replicas of the same model replica leave writing to this rank.
        main: whether all replicas do, those of data-parallel ranks included.
        flexible: see `Shard`.
    """

    key: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    blocks: tuple[Block, ...]
    tensor: Tensor
    first: bool
    main: bool
    flexible: bool

    def shards(self, name: str, data: Tensor, main: bool, span: tuple[int, int] | None = None) -> Iterator[Shard]:
        """Shards of a tensor that lies as the parameter does.

        Args:
            name: of the whole tensor.
            data: with the parameter's local shape, or the elements `span` of it, flattened.
            main: whether this rank writes them.
            span: first and one past the last element.
        """
        for box, part in self._parts(data, span):
            for block in self.blocks:
                common = box.overlap(block.local)
                if common is not None:
                    place = common.moved(block.local.offset, block.offset)
                    yield Shard(name, self.shape, place, part[common.within(box)], main, self.flexible)

    def _parts(self, data: Tensor, span: tuple[int, int] | None) -> Iterator[tuple[Box, Tensor]]:
        if span is None:
            yield Box.whole(self.local), data.detach().view(self.local)
            return
        flat, start = data.detach().view(-1), 0
        for box in cut(self.local, *span):
            yield box, flat[start : start + box.size].view(box.shape)
            start += box.size

    def holds_first_element(self, span: tuple[int, int] | None) -> bool:
        """Whether this rank has element 0 of the whole parameter; it writes what exists once a parameter."""
        at_start = any(not any(block.offset) and not any(block.local.offset) for block in self.blocks)
        return at_start and (span is None or span[0] == 0)
