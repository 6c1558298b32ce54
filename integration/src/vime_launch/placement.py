"""Which devices a process gets, and in which order: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


def sort_gpu_ids(ids: Iterable[str | int]) -> list[str]:
    """Device ids in the order of their numbers (``"2"`` before ``"10"``); ids that are no numbers (UUIDs) follow, as text."""
    texts = [str(one) for one in ids]
    return sorted(texts, key=lambda one: (not one.isdigit(), int(one) if one.isdigit() else 0, one))


def visible_devices(ids: Iterable[str | int]) -> str:
    """The value of ``CUDA_VISIBLE_DEVICES`` for these ids."""
    return ",".join(sort_gpu_ids(ids))


@dataclass(frozen=True)
class Bundle:
    """A share of a host, as a placement group granted it."""

    index: int
    host: str
    gpus: tuple[str, ...] = ()


def order_bundles(bundles: Sequence[Bundle]) -> list[Bundle]:
    """Bundles host by host and, within a host, by their first device, so that neighbours in rank share a host.

    A placement group numbers its bundles in no stated order. Hosts keep the order in which the lowest bundle index names them.
    """
    first: dict[str, int] = {}
    for bundle in sorted(bundles, key=lambda one: one.index):
        first.setdefault(bundle.host, len(first))

    def place(bundle: Bundle) -> tuple:
        gpus = sort_gpu_ids(bundle.gpus)
        key = (not gpus[0].isdigit(), int(gpus[0]) if gpus[0].isdigit() else 0, gpus[0]) if gpus else (False, -1, "")
        return (first[bundle.host], *key, bundle.index)

    return sorted(bundles, key=place)


def merge_environment(base: Mapping[str, str], own: Mapping[str, str], gpus: Sequence[str]) -> dict[str, str]:
    """The environment of a stage: the host's, then the devices granted to it, then the recipe's own entries."""
    devices = {"CUDA_VISIBLE_DEVICES": visible_devices(gpus)} if gpus else {}
    return {**base, **devices, **own}
