"""Segments that each rank reduces, among all workers or intra-node."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from horovod_quant.codecs.base import Codec
from horovod_quant.kernels.layout import ceil_div, split_points
from horovod_quant.kernels.segments import Rounder, Segment
from horovod_quant.reductions.base import segments_batch
from horovod_quant.reductions.requests import ALL, Alltoall
from horovod_quant.reductions.tensors import Gradient


class Part(NamedTuple):
    """Segments that a rank reduces, with their offsets in the payload."""

    rank: int
    at: Sequence[int]
    segments: Sequence[Segment]


class Division:
    """Division of tensors into segments of each rank.

    Args:
        of: segments of each rank.
        tensors: number of tensors.

    Attributes:
        segments: segments of all ranks, concatenated.
    """

    def __init__(self, of: list[list[Segment]], tensors: int) -> None:
        self.of = of
        self.tensors = tensors
        self.segments = [segment for segments in of for segment in segments]
        self._elements = [tuple([segment.elements for segment in segments]) for segments in of]
        self._by_tensor: dict[Codec, list[int]] = {}
        self._parts: dict[Codec, tuple[list[Part], list[list[Part]]]] = {}

    def lengths(self, codec: Codec) -> list[int]:
        """Return the payload lengths of each rank's segments."""
        return [codec.offsets(elements)[-1] for elements in self._elements]

    def lengths_by_tensor(self, codec: Codec) -> list[int]:
        """Return each tensor's payload lengths.

        The list is cached and must not be changed.
        """
        if codec not in self._by_tensor:
            found = self._by_tensor[codec] = [0] * self.tensors
            for segment in self.segments:
                found[segment.tensor] += codec.words(segment.elements)
        return self._by_tensor[codec]

    def alltoall(
        self, codec: Codec, gradients: Sequence[Gradient], rounder: Rounder, kernels: Any, group: str = ALL
    ) -> Alltoall:
        """Encode each rank's segments, and return the request that sends them there."""
        batch = segments_batch(gradients, self.segments, with_values=True)
        item_bytes = np.dtype(codec.dtype).itemsize
        sizes = [item_bytes * length for length in self.lengths_by_tensor(codec)]
        return Alltoall(codec.encode(kernels, batch, rounder), self.lengths(codec), sizes, group)

    def shares(self, sizes: Sequence[int], ranks: Sequence[int]) -> list[float]:
        """Return the bytes of ranks' arrays by tensor, in proportion to elements.

        Each rank has one segment of each tensor, see `ranges_of`.
        """
        return (np.array(sizes, np.float64) @ self._weights[list(ranks)]).tolist()

    @cached_property
    def _weights(self) -> np.ndarray:
        counts = np.array(self._elements, np.float64).reshape(len(self.of), self.tensors)
        return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)

    def parts_of(self, codec: Codec, tensors: Sequence[int]) -> Sequence[Part]:
        """Return the payloads' parts with segments of these tensors, numbered by position."""
        if codec not in self._parts:
            self._parts[codec] = self._found_parts(codec)
        all_parts, by_tensor = self._parts[codec]
        if len(tensors) == 1:
            return by_tensor[tensors[0]]
        if len(tensors) == self.tensors and list(tensors) == list(range(self.tensors)):
            return all_parts
        return [
            Part(part.rank, part.at, [segment._replace(tensor=position) for segment in part.segments])
            for position, tensor in enumerate(tensors)
            for part in by_tensor[tensor]
        ]

    def _found_parts(self, codec: Codec) -> tuple[list[Part], list[list[Part]]]:
        """Return the parts of all tensors, and of each alone."""
        by_tensor: list[list[Part]] = [[] for _ in range(self.tensors)]
        found = []
        for rank, (elements, segments) in enumerate(zip(self._elements, self.of)):
            # Where a rank has nothing of a tensor, there is nothing to decode.
            filled = [each for each in zip(codec.offsets(elements), segments) if each[1].elements]
            found.append(Part(rank, [at for at, _ in filled], [segment for _, segment in filled]))
            for at, segment in filled:
                by_tensor[segment.tensor].append(Part(rank, (at,), [segment._replace(tensor=0)]))
        return found, by_tensor


@lru_cache(maxsize=64)  # the groups of every step have tensors of the same lengths
def shards_of(elements: tuple[int, ...], workers: int, align: int) -> Division:
    """Return the shards of all ranks, units of ``align`` elements."""
    first = split_points([ceil_div(count, align) for count in elements])  # unit of each tensor
    bounds = [first[-1] * rank // workers for rank in range(workers + 1)]
    of = [
        [
            Segment(i, (max(low, first[i]) - first[i]) * align, min(count, (high - first[i]) * align))
            for i, count in enumerate(elements)
            if max(low, first[i]) < min(high, first[i + 1])
        ]
        for low, high in zip(bounds, bounds[1:])
    ]
    return Division(of, len(elements))


@lru_cache(maxsize=64)
def ranges_of(names: tuple[str, ...], elements: tuple[int, ...], owners: int, unit: int) -> Division:
    """Return the ranges of tensors that each worker of a node owns.

    Args:
        names: names of the tensors.
        elements: lengths of the tensors.
        owners: number of workers of the node.
        unit: segments begin at multiples of this number of elements.
    """
    tensors = list(enumerate(zip(names, elements)))
    of = [
        [Segment(i, *owned_range(name, count, owners, owner, unit)) for i, (name, count) in tensors]
        for owner in range(owners)
    ]
    return Division(of, len(elements))


def owned_range(name: str, elements: int, owners: int, owner: int, unit: int) -> tuple[int, int]:
    """Return start and stop of the elements that a worker owns.

    Runs of ``unit`` elements are divided as evenly as possible. The result depends on the tensor alone, because state
    belongs to it, and the name decides where to begin, so that no worker gets all the small tensors.
    """
    units = ceil_div(elements, unit)
    position = (owner + zlib.crc32(name.encode())) % owners
    low, high = units * position // owners, units * (position + 1) // owners
    return min(low * unit, elements), min(high * unit, elements)
