"""BinSGDM: extreme one-bit quantization for communication-efficient large-scale distributed training.

Peng et al. ICLR 2023 submission; published as Birder, NeurIPS 2023. The optimizer's update itself is one bit per
element; momentum and scale stay on their worker. More than one bit from the servers is not the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable

import numpy as np

from horovod_quant.kernels.arrays import Part, no_part
from horovod_quant.kernels.keys import Key, keys_of
from horovod_quant.kernels.layout import ROW, TILE, ceil_div, code_words, tiles
from horovod_quant.kernels.reference import uniform_levels
from horovod_quant.kernels.span import as_array
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
    require_int,
    use_plain_ints,
)
from horovod_quant.schemes.chunks import Chunks, Segment, chunks_of
from horovod_quant.schemes.registry import register

MOST_SERVER_BITS = 8


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

    With ``server_bits`` above 1 (not in the paper) the servers return the average itself, and the optimizer moves each
    element by it instead of by +1 or -1. One bit up and ``server_bits`` down are ``(1 + server_bits) / 2`` times the
    default's bytes.

    Args:
        server_bits: bits of an element that the servers return, 1 to 8. 1: a bit drawn from the average, as in the
            paper. More: a sign, and a magnitude of one bit less. They hold the exact average of up to
            ``2^(server_bits - 1)`` workers, and of any even number of workers below ``2^server_bits``: 3 bits do for 4
            workers. With more workers it is rounded at random, without bias.

    Raises:
        ValueError: an argument is out of range.
    """

    server_bits: int = 1

    compared = ("binsgdm",)
    own_optimizer = "BinSGDM"
    own_steps = 2  # docs/results.md: with as many steps as Adam the loss stays above Adam's

    def __post_init__(self) -> None:
        require_int("server_bits", self.server_bits, 1, MOST_SERVER_BITS)
        use_plain_ints(self, "server_bits")

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return (Collective(Alltoall, "int32"), Collective(Allgather, "int32"))

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        if any(gradient.state is None for gradient in gradients):
            raise ValueError("BinSGDM exchanges only gradients of its own optimizer: no momentum was given")
        chunks = chunks_of((gradient.elements for gradient in gradients), workers.size)
        table = kernels.Table([each.held for each in gradients]) if hasattr(kernels, "Table") else None
        words, broken = _binarized(gradients, workers, kernels, table)
        parts = []
        for server in range(workers.size):
            low, high = chunks.bounds[server], chunks.bounds[server + 1]
            parts += _piece(words[low * ROW : high * ROW], broken[low:high], high - low, kernels)
        splits = _splits(chunks, 1)

        received = yield from checked(
            Alltoall(kernels.assemble(parts), splits, chunks.parts(4 * ROW)), workers
        )

        own_tiles = chunks.tile_count(workers.rank)
        votes = [piece[: own_tiles * ROW] for piece in received]
        served = self._served(chunks, gradients, votes, workers, kernels)
        own_flags = kernels.unpack_flags(received[0][own_tiles * ROW :], own_tiles)
        for piece in received[1:]:
            own_flags = own_flags | kernels.unpack_flags(piece[own_tiles * ROW :], own_tiles)

        sizes = [count / workers.size for count in chunks.parts(4 * ROW * self.server_bits)]
        piece = kernels.assemble(_piece(served, own_flags, own_tiles, kernels))
        del served  # before the gathered pieces come
        gathered = yield from checked(Allgather(piece, sizes, _splits(chunks, self.server_bits)), workers)
        return self._opened(gathered, [each.elements for each in gradients], workers, kernels, table)

    def received_parts(self, elements: Sequence[int], workers: Workers) -> Sequence[tuple[int, Any]]:
        """The servers' bits or codes, and flags."""
        return [(words, np.int32) for words in _splits(chunks_of(elements, workers.size), self.server_bits)]

    def opened(
        self, received: Sequence[Any], extents: Sequence[Extent], workers: Workers, kernels: Any
    ) -> Decoded:
        return self._opened(received, [extent.elements for extent in extents], workers, kernels, None)

    def _opened(
        self, received: Sequence[Any], elements: Sequence[int], workers: Workers, kernels: Any, table: Any
    ) -> Decoded:
        """``table``: of the gradients, if there is one."""
        chunks = chunks_of(elements, workers.size)
        counts = [chunks.tile_count(server) for server in range(workers.size)]
        tile_words = ROW * self.server_bits
        words = kernels.concatenate([piece[: count * tile_words] for piece, count in zip(received, counts)])
        all_flags = kernels.concatenate(
            [
                kernels.unpack_flags(piece[count * tile_words :], count)
                for piece, count in zip(received, counts)
            ]
        )
        tile_at = chunks.tile_at

        def write(i: int, factor: float, out: Any) -> Any:
            low, high = tile_at[i], tile_at[i + 1]
            own = words[low * tile_words : high * tile_words]
            if self.server_bits == 1:
                values = kernels.decode_signs(own, factor * workers.size, out)
            else:
                reach = self._reaches(high - low, workers)
                values = kernels.decode_uniform_codes([own], [reach], TILE, self.server_bits, factor, out)
            return kernels.with_nan_tiles(values, all_flags[low:high])

        def write_all(factor: float, outs: Sequence[Any]) -> None:
            kernels.decode_signs_each(words, factor * workers.size, outs, table)
            if all_flags.any():
                for i, out in enumerate(outs):
                    kernels.with_nan_tiles(as_array(out), all_flags[tile_at[i] : tile_at[i + 1]])

        at_once = write_all if self.server_bits == 1 and hasattr(kernels, "Table") else None
        return Decoded(workers.size, write, write_all=at_once, received=received)

    def _served(
        self,
        chunks: Chunks,
        gradients: Sequence[Gradient],
        votes: Sequence[Any],
        workers: Workers,
        kernels: Any,
    ) -> Any:
        """What this worker's chunk comes back as, in whole tiles, from all workers' bits of it."""
        segments = chunks.segments(workers.rank)
        if self.server_bits == 1 and hasattr(kernels, "Table"):
            own = [gradients[segment.gradient] for segment in segments]
            keys = keys_of([each.keys for each in own], "server", [each.step for each in own])
            starts = [each.start + segment.start for each, segment in zip(own, segments)]
            return kernels.vote_each(votes, [segment.tile_count for segment in segments], keys, starts)

        def key(segment: Segment) -> Key:
            # Every worker would draw the same bits here, so the result does not depend on who serves what.
            gradient = gradients[segment.gradient]
            return gradient.keys.key("server", gradient.step)

        def own_votes(segment: Segment) -> list[Any]:
            own = slice(segment.tile * ROW, (segment.tile + segment.tile_count) * ROW)
            return [words[own] for words in votes]

        def start(segment: Segment) -> int:
            return gradients[segment.gradient].start + segment.start

        def vote(segment: Segment, out: Any) -> Any:
            return kernels.vote(own_votes(segment), key(segment), start(segment), out)

        def count(segment: Segment, out: Any) -> Any:
            total = _sum_of_signs(own_votes(segment), segment.elements, kernels)
            reach = self._reaches(segment.tile_count, workers)
            return kernels.encode_uniform_codes(
                total, reach, TILE, self.server_bits, key(segment), start(segment), out
            )

        if self.server_bits == 1:
            parts: list[Part] = [(ROW * each.tile_count, np.int32, partial(vote, each)) for each in segments]
        else:
            parts = [
                part
                for piece in chunks.pieces(workers.rank, kernels.TILES_AT_A_TIME)
                for part in self._in_whole_tiles(piece, partial(count, piece))
            ]
        return kernels.assemble([*parts, no_part(np.int32)])

    def _in_whole_tiles(self, segment: Segment, encode: Callable[[Any], Any]) -> list[Part]:
        """A segment's codes, then zeros up to the end of its last tile."""
        used = code_words(segment.elements, self.server_bits)
        unused = segment.tile_count * ROW * self.server_bits - used
        return [(used, np.int32, encode), (unused, np.int32, lambda out: np.zeros(unused, np.int32))]

    def _reaches(self, tile_count: int, workers: Workers) -> np.ndarray:
        """For each tile the sum of the workers' signs that the largest code stands for.

        That is the number of workers, unless there are so few that every possible sum has a code: an even number has
        even sums, of which code 1 is 2; an odd number odd ones, of which code 1 is 1. A sum divided by this, times the
        number of levels, is then exact in any arithmetic, because the quotient of the two is a power of two.
        """
        levels, distance = uniform_levels(self.server_bits), 1 + (workers.size + 1) % 2
        reach = levels * distance if workers.size <= levels * distance else workers.size
        return np.full(tile_count, reach, np.float32)


def _binarized(gradients: Sequence[Gradient], workers: Workers, kernels: Any, table: Any) -> tuple[Any, Any]:
    """Updates the gradients' momenta and scales; returns all bits, in whole tiles, and the tiles' flags."""
    if table is not None:
        keys = keys_of(
            [each.keys for each in gradients], "worker", [each.step for each in gradients], workers.rank
        )
        states: list[Any] = [gradient.state for gradient in gradients]
        return kernels.binarize_each(
            table,
            [state.momentum for state in states],
            [state.scale for state in states],
            [state.beta for state in states],
            keys,
            [gradient.start for gradient in gradients],
        )
    flags: list[Any] = []

    def draw(gradient: Gradient, out: Any) -> Any:
        assert gradient.state is not None
        momentum, scale, beta = gradient.state
        key = gradient.keys.key("worker", gradient.step, workers.rank)
        words, broken = kernels.binarize(gradient.values, momentum, scale, beta, key, gradient.start, out)
        flags.append(broken)
        return words

    words = kernels.assemble(
        [(ROW * tiles(gradient.elements), np.int32, partial(draw, gradient)) for gradient in gradients]
    )
    return words, kernels.concatenate([*flags, np.zeros(0, bool)])


def _sum_of_signs(votes: Sequence[Any], elements: int, kernels: Any) -> Any:
    """The sum of the workers' signs, float32, exactly.

    As a mean: of a power of two of arrays, whose inverse is no rounded number.
    """
    places = 1 << (len(votes) - 1).bit_length()

    def decoded(words: Any, magnitude: float) -> Any:
        return kernels.decode_signs(words, magnitude, kernels.target(elements))

    arrays = [decoded(words, float(places)) for words in votes]
    if places > len(votes):
        arrays += [decoded(votes[0], 0.0)] * (places - len(votes))
    return kernels.mean(arrays)


def _splits(chunks: Chunks, bits: int) -> list[int]:
    """Lengths of the servers' pieces."""
    return [_piece_words(chunks.tile_count(server), bits) for server in range(len(chunks.bounds) - 1)]


def _piece_words(tile_count: int, bits: int) -> int:
    """Length of a piece: rows of codes of so many bits a tile, then one flag bit a tile in whole words."""
    return tile_count * ROW * bits + ceil_div(tile_count, 32)


def _piece(words: np.ndarray, broken: np.ndarray, tile_count: int, kernels: Any) -> list:
    return [
        (words.shape[0], np.int32, lambda out: words),
        (ceil_div(tile_count, 32), np.int32, lambda out: kernels.pack_flags(broken)),
    ]
