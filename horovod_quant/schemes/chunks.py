"""Which worker serves which tiles of a group, for exchanges in which each worker owns a chunk.

The tiles (1,024 elements) of a group's gradients stand one after another; worker j serves the j-th run of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovod_quant.kernels.layout import TILE, tiles
from horovod_quant.schemes.base import split_points


class Segment(NamedTuple):
    """Part of one gradient inside one chunk."""

    gradient: int
    start: int  # first element, within the gradient
    stop: int
    tile: int  # first tile, within the chunk
    tile_count: int


class Chunks:
    """Cuts the tiles of gradients with the given lengths into one chunk a worker, as evenly as tiles allow."""

    def __init__(self, elements: Sequence[int], workers: int) -> None:
        self.elements = list(elements)
        self._tile_at = split_points([tiles(count) for count in elements])
        total = self._tile_at[-1]
        self.bounds = [total * worker // workers for worker in range(workers + 1)]

    def tile_count(self, worker: int) -> int:
        return self.bounds[worker + 1] - self.bounds[worker]

    def pieces(self, worker: int, most_tiles: int) -> list[Segment]:
        """The segments of a worker's chunk, cut into pieces of at most ``most_tiles`` tiles."""
        return [
            Segment(
                segment.gradient,
                segment.start + offset * TILE,
                min(segment.stop, segment.start + (offset + most_tiles) * TILE),
                segment.tile + offset,
                min(most_tiles, segment.tile_count - offset),
            )
            for segment in self.segments(worker)
            for offset in range(0, segment.tile_count, most_tiles)
        ]

    def segments(self, worker: int) -> list[Segment]:
        """The gradients' parts in a worker's chunk, in order."""
        low, high = self.bounds[worker], self.bounds[worker + 1]
        found = []
        for gradient, count in enumerate(self.elements):
            first = max(low, self._tile_at[gradient])
            last = min(high, self._tile_at[gradient + 1])
            if first < last:
                start = (first - self._tile_at[gradient]) * TILE
                stop = min(count, (last - self._tile_at[gradient]) * TILE)
                found.append(Segment(gradient, start, stop, first - low, last - first))
        return found

    def parts(self, bytes_per_tile: int) -> list[int]:
        """Bytes of each gradient's tiles."""
        return [bytes_per_tile * tiles(count) for count in self.elements]
