"""BinSGDM: extreme one-bit quantization for communication-efficient large-scale distributed training.

Peng et al. ICLR 2023 submission; published as Birder, NeurIPS 2023. The optimizer's update itself is one bit per
element; momentum and scale stay on their worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from horovod_quant.kernels.arrays import no_part
from horovod_quant.kernels.layout import ROW, ceil_div, tiles
from horovod_quant.schemes.base import (
    Allgather,
    Alltoall,
    Collective,
    Decoded,
    Exchange,
    Extent,
    Gradient,
    Scheme,
    Workers,
    checked,
    split_points,
)
from horovod_quant.schemes.chunks import Chunks, Segment
from horovod_quant.schemes.registry import register


@register
@dataclass(frozen=True)
class BinSGDM(Scheme):
    """BinSGDM's 1-bit allreduce.

    1. Each worker updates its momentum and scale, and draws one bit per element.
    2. An alltoall sends all workers' bits of a chunk to the worker that serves the chunk.
    3. The server averages the n bits of each element and draws one bit from the average.
    4. An allgather distributes the servers' bits.

    A tile (1,024 elements) with a non-finite gradient on any worker decodes to NaN on all workers; one flag bit per
    tile travels with the signs.
    """

    compared = ("binsgdm",)
    own_optimizer = "BinSGDM"
    own_steps = 2  # docs/results.md: with as many steps as Adam the loss stays above Adam's

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return (Collective(Alltoall, "int32"), Collective(Allgather, "int32"))

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        chunks = Chunks([gradient.elements for gradient in gradients], workers.size)
        flags: list[np.ndarray] = []

        def draw(gradient: Gradient, out: Any) -> np.ndarray:
            if gradient.state is None:
                raise ValueError(
                    "BinSGDM exchanges only gradients of its own optimizer: no momentum was given"
                )
            momentum, scale, beta = gradient.state
            key = gradient.keys.key("worker", gradient.step, workers.rank)
            words, broken = kernels.binarize(gradient.values, momentum, scale, beta, key, gradient.start, out)
            flags.append(broken)
            return words

        words = kernels.assemble(
            [(ROW * tiles(gradient.elements), np.int32, partial(draw, gradient)) for gradient in gradients]
        )
        broken = kernels.concatenate([*flags, np.zeros(0, bool)])
        parts = []
        for server in range(workers.size):
            low, high = chunks.bounds[server], chunks.bounds[server + 1]
            parts += _piece(words[low * ROW : high * ROW], broken[low:high], high - low, kernels)
        splits = _splits(chunks)

        received = yield from checked(
            Alltoall(kernels.assemble(parts), splits, chunks.parts(4 * ROW)), workers
        )

        own_tiles = chunks.tile_count(workers.rank)
        votes = [piece[: own_tiles * ROW] for piece in received]

        def vote(segment: Segment, out: Any) -> np.ndarray:
            gradient = gradients[segment.gradient]
            own = slice(segment.tile * ROW, (segment.tile + segment.tile_count) * ROW)
            # Every worker would draw the same bits here, so the result does not depend on who serves what.
            key = gradient.keys.key("server", gradient.step)
            return kernels.vote([words[own] for words in votes], key, gradient.start + segment.start, out)

        served_parts = [
            (ROW * segment.tile_count, np.int32, partial(vote, segment))
            for segment in chunks.segments(workers.rank)
        ]
        served = kernels.assemble([*served_parts, no_part(np.int32)])
        own_flags = kernels.unpack_flags(received[0][own_tiles * ROW :], own_tiles)
        for piece in received[1:]:
            own_flags = own_flags | kernels.unpack_flags(piece[own_tiles * ROW :], own_tiles)

        sizes = [count / workers.size for count in chunks.parts(4 * ROW)]
        piece = kernels.assemble(_piece(served, own_flags, own_tiles, kernels))
        gathered = yield from checked(Allgather(piece, sizes, splits), workers)
        return self.opened(gathered, [gradient.extent for gradient in gradients], workers, kernels)

    def received_parts(self, elements: Sequence[int], workers: Workers) -> Sequence[tuple[int, Any]]:
        """The servers' bits and flags."""
        return [(words, np.int32) for words in _splits(Chunks(elements, workers.size))]

    def opened(
        self, received: Sequence[Any], extents: Sequence[Extent], workers: Workers, kernels: Any
    ) -> Decoded:
        elements = [extent.elements for extent in extents]
        chunks = Chunks(elements, workers.size)
        counts = [chunks.tile_count(server) for server in range(workers.size)]
        signs = kernels.concatenate([piece[: count * ROW] for piece, count in zip(received, counts)])
        all_flags = kernels.concatenate(
            [kernels.unpack_flags(piece[count * ROW :], count) for piece, count in zip(received, counts)]
        )
        tile_at = split_points([tiles(count) for count in elements])

        def write(i: int, factor: float, out: Any) -> Any:
            low, high = tile_at[i], tile_at[i + 1]
            values = kernels.decode_signs(signs[low * ROW : high * ROW], factor * workers.size, out)
            return kernels.with_nan_tiles(values, all_flags[low:high])

        return Decoded(workers.size, write, received=received)


def _splits(chunks: Chunks) -> list[int]:
    """Lengths of the servers' pieces."""
    return [_piece_words(chunks.tile_count(server)) for server in range(len(chunks.bounds) - 1)]


def _piece_words(tile_count: int) -> int:
    """Length of a piece: a row of sign words a tile, then one flag bit a tile in whole words."""
    return tile_count * ROW + ceil_div(tile_count, 32)


def _piece(words: np.ndarray, broken: np.ndarray, tile_count: int, kernels: Any) -> list:
    return [
        (tile_count * ROW, np.int32, lambda out: words),
        (ceil_div(tile_count, 32), np.int32, lambda out: kernels.pack_flags(broken)),
    ]
