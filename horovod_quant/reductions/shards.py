"""Which worker serves which tiles of a group, for exchanges in which each worker owns a chunk.

The tiles (1,024 elements) of a group's gradients stand one after another; worker j serves the j-th run of them. In a
hierarchical exchange, moreover, each worker of a node owns a run of each gradient's elements.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from horovod_quant.codecs.base import Codec
from horovod_quant.kernels.layout import TILE, ceil_div
from horovod_quant.kernels.segments import Segment
from horovod_quant.reductions.requests import split_points


class Run(NamedTuple):
    """Part of one gradient inside one chunk."""

    gradient: int
    start: int  # first element, within the gradient
    stop: int
    tile: int  # first tile, within the chunk
    tile_count: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


class Chunks:
    """Cuts the tiles of gradients with the given lengths into one chunk a worker, as evenly as tiles allow.

    Args:
        elements: the gradients' lengths.
        workers: their number.
        tile: elements that stay together.

    Attributes:
        tile_at: the number of each gradient's first tile, and that of all tiles.
    """

    def __init__(self, elements: Sequence[int], workers: int, tile: int = TILE) -> None:
        self.elements = list(elements)
        self._tile = tile
        self.tile_at = split_points([ceil_div(count, tile) for count in elements])
        self._segments: dict[int, list[Run]] = {}
        total = self.tile_at[-1]
        self.bounds = [total * worker // workers for worker in range(workers + 1)]

    def tile_count(self, worker: int) -> int:
        return self.bounds[worker + 1] - self.bounds[worker]

    def pieces(self, worker: int, most_tiles: int) -> list[Run]:
        """The segments of a worker's chunk, cut into pieces of at most ``most_tiles`` tiles."""
        return [
            Run(
                segment.gradient,
                segment.start + offset * self._tile,
                min(segment.stop, segment.start + (offset + most_tiles) * self._tile),
                segment.tile + offset,
                min(most_tiles, segment.tile_count - offset),
            )
            for segment in self.segments(worker)
            for offset in range(0, segment.tile_count, most_tiles)
        ]

    def segments(self, worker: int) -> list[Run]:
        """The gradients' parts in a worker's chunk, in order. The same list every time, to be left as it is."""
        if worker not in self._segments:
            self._segments[worker] = self._found_segments(worker)
        return self._segments[worker]

    def _found_segments(self, worker: int) -> list[Run]:
        low, high = self.bounds[worker], self.bounds[worker + 1]
        found = []
        for gradient, count in enumerate(self.elements):
            first = max(low, self.tile_at[gradient])
            last = min(high, self.tile_at[gradient + 1])
            if first < last:
                start = (first - self.tile_at[gradient]) * self._tile
                stop = min(count, (last - self.tile_at[gradient]) * self._tile)
                found.append(Run(gradient, start, stop, first - low, last - first))
        return found

    def parts(self, bytes_per_tile: int) -> list[int]:
        """Bytes of each gradient's tiles."""
        return [bytes_per_tile * ceil_div(count, self._tile) for count in self.elements]


def chunks_of(elements: Iterable[int], workers: int, tile: int = TILE) -> Chunks:
    """`Chunks`, found once: every step's groups have gradients of the same lengths."""
    return _chunks_of(tuple(elements), workers, tile)


@lru_cache(maxsize=64)
def _chunks_of(elements: tuple[int, ...], workers: int, tile: int) -> Chunks:
    return Chunks(elements, workers, tile)


def owned_range(name: str, elements: int, owners: int, owner: int, unit: int) -> tuple[int, int]:
    """Which elements of a tensor a worker of a node owns: from the first number to before the second.

    Runs of ``unit`` elements are shared out as evenly as their number allows. It depends on the tensor alone, because
    state belongs to it, and the name decides where to begin, so that no worker gets all the small tensors.
    """
    units = ceil_div(elements, unit)
    place = (owner + zlib.crc32(name.encode())) % owners
    low, high = units * place // owners, units * (place + 1) // owners
    return min(low * unit, elements), min(high * unit, elements)


class Part(NamedTuple):
    """Segments that a rank reduces, and where each begins in the payload of their shard."""

    rank: int
    at: Sequence[int]
    segments: Sequence[Segment]


class Shards:
    """The segments that each rank reduces, for tensors with these lengths.

    Attributes:
        of: for each rank its segments.
    """

    def __init__(self, elements: tuple[int, ...], workers: int, align: int) -> None:
        chunks = Chunks(elements, workers, align)
        self._tensors = len(elements)
        self.of = [
            [Segment(each.gradient, each.start, each.stop) for each in chunks.segments(rank)]
            for rank in range(workers)
        ]
        self._bytes: dict[Codec, list[int]] = {}
        self._parts: dict[Codec, tuple[list[Part], list[list[Part]]]] = {}
        self._lengths = [tuple(segment.elements for segment in segments) for segments in self.of]

    @cached_property
    def segments(self) -> list[Segment]:
        """Of all ranks, one after another."""
        return [segment for segments in self.of for segment in segments]

    def lengths(self, codec: Codec) -> list[int]:
        """Words of the payload of each shard."""
        return [codec.offsets(lengths)[-1] for lengths in self._lengths]

    def bytes_by_tensor(self, codec: Codec) -> list[int]:
        """Of the payloads of all shards."""
        if codec not in self._bytes:
            self._bytes[codec] = self._found_bytes(codec)
        return self._bytes[codec]

    def _found_bytes(self, codec: Codec) -> list[int]:
        found = [0] * self._tensors
        for segment in self.segments:
            found[segment.tensor] += 4 * codec.words(segment.elements)
        return found

    def parts_of(self, codec: Codec, tensors: Sequence[int]) -> Sequence[Part]:
        """The parts of the payloads of ``codec`` with segments of these tensors, numbered by their places."""
        if codec not in self._parts:
            self._parts[codec] = self._found_parts(codec)
        all_parts, by_tensor = self._parts[codec]
        if len(tensors) == 1:
            return by_tensor[tensors[0]]
        if len(tensors) == self._tensors and list(tensors) == list(range(self._tensors)):
            return all_parts
        return [
            Part(part.rank, part.at, [segment._replace(tensor=place) for segment in part.segments])
            for place, tensor in enumerate(tensors)
            for part in by_tensor[tensor]
        ]

    def _found_parts(self, codec: Codec) -> tuple[list[Part], list[list[Part]]]:
        """Of all tensors, and of each alone."""
        by_tensor: list[list[Part]] = [[] for _ in range(self._tensors)]
        found = []
        for rank, (lengths, segments) in enumerate(zip(self._lengths, self.of)):
            offsets = codec.offsets(lengths)
            found.append(Part(rank, offsets, segments))
            for at, segment in zip(offsets, segments):
                by_tensor[segment.tensor].append(Part(rank, (at,), [segment._replace(tensor=0)]))
        return found, by_tensor


def shards_of(elements: Iterable[int], workers: int, align: int) -> Shards:
    """`Shards`, found once: the groups of every step have tensors of the same lengths."""
    return _shards_of(tuple(elements), workers, align)


@lru_cache(maxsize=64)
def _shards_of(elements: tuple[int, ...], workers: int, align: int) -> Shards:
    return Shards(elements, workers, align)
