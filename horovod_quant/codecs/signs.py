"""Codecs of BinSGDM: bits with flags, and averages of bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from horovod_quant.codecs.base import REDUCER, Codec
from horovod_quant.kernels.arrays import Part, no_part, whole_tiles
from horovod_quant.kernels.buffer_view import as_array
from horovod_quant.kernels.layout import ROW, TILE, ceil_div, tiles
from horovod_quant.kernels.reference import uniform_levels
from horovod_quant.kernels.segments import Batch, Rounder, any_flags, segment_kernels


@dataclass(frozen=True)
class Signs(Codec):
    """One bit per element, with a probability from momentum and scale.

    A tile with an element that is not finite is flagged, and decodes to NaN.
    """

    def words(self, elements: int) -> int:
        return tiles(elements) * ROW + ceil_div(tiles(elements), ROW)

    def encode(self, kernels: Any, batch: Batch, rounder: Rounder) -> Any:
        """Encode the batch and update its states.

        Raises:
            ValueError: the batch has no states.
        """
        if any(state is None for state in batch.states):
            raise ValueError("BinSGDM reduces only gradients of its optimizer: no momentum was given")
        return segment_kernels(kernels).binarize(batch, rounder, self.offsets(batch.elements))

    def decode(
        self,
        kernels: Any,
        payloads: Sequence[Any],
        at: Sequence[int],
        batch: Batch,
        domain: str,
        factor: Any,
        outs: Sequence[Any],
    ) -> Sequence[Any]:
        """Write the values of a single payload, a reducer's, times a factor."""
        (payload,) = payloads
        return segment_kernels(kernels).decode_signs(payload, batch, at, factor, outs)

    def reduce(
        self, kernels: Any, payloads: Sequence[Any], at: Sequence[int], batch: Batch, gather: Codec
    ) -> Any:
        """Encode bits drawn from averages, or with `SignAverages` the averages."""
        if isinstance(gather, SignAverages):
            return gather.of_signs(kernels, payloads, at, batch)
        return segment_kernels(kernels).vote(payloads, batch, Rounder(REDUCER), at)


@dataclass(frozen=True)
class SignAverages(Codec):
    """Codec of all workers' averaged signs, as a sign and a magnitude.

    Codes are exact for up to ``2^(bits - 1)`` workers, and for any even number of workers below ``2^bits``; with more
    they are rounded at random, without bias.

    Args:
        bits: width of a code.
        workers: number of workers.
    """

    bits: int
    workers: int

    of_sums = True

    def words(self, elements: int) -> int:
        return tiles(elements) * ROW * self.bits + ceil_div(tiles(elements), ROW)

    def encode(self, kernels: Any, batch: Batch, rounder: Rounder) -> Any:
        raise NotImplementedError

    def of_signs(self, kernels: Any, payloads: Sequence[Any], at: Sequence[int], batch: Batch) -> Any:
        """Encode the averages over payloads of `Signs`."""

        def average(i: int, first: int, elements: int, out: Any) -> Any:
            """Encode the averages of some tiles of segment i."""
            part = slice(at[i] + first * ROW, at[i] + (first + tiles(elements)) * ROW)
            total = _sum_of_signs([payload[part] for payload in payloads], elements, kernels)
            key = Rounder(REDUCER).key(batch.chains[i], batch.steps[i])
            start, reach = batch.starts[i] + first * TILE, self._reaches(tiles(elements))
            return kernels.encode_uniform_codes(total, reach, TILE, self.bits, key, start, out)

        most = kernels.TILES_AT_A_TIME
        parts: list[Part] = []
        for i, elements in enumerate(batch.elements):
            for first in range(0, tiles(elements), most):
                count = min(elements - first * TILE, most * TILE)
                parts += whole_tiles(count, self.bits, partial(average, i, first, count))
            parts.append(any_flags(payloads, at[i] + ROW * tiles(elements), elements))
        return kernels.pack([*parts, no_part(np.int32)])

    def decode(
        self,
        kernels: Any,
        payloads: Sequence[Any],
        at: Sequence[int],
        batch: Batch,
        domain: str,
        factor: Any,
        outs: Sequence[Any],
    ) -> Sequence[Any]:
        (payload,) = payloads
        results = []
        for elements, start, out in zip(batch.elements, at, outs):
            count = tiles(elements)
            middle, end = start + count * ROW * self.bits, start + self.words(elements)
            reach = self._reaches(count)
            values = kernels.decode_uniform_codes(
                [payload[start:middle]], [reach], TILE, self.bits, factor, as_array(out)
            )
            flags = kernels.unpack_flags(payload[middle:end], count)
            results.append(kernels.with_nan_tiles(values, flags))
        return results

    def _reaches(self, tile_count: int) -> np.ndarray:
        """Return the sum that the largest code represents, per tile.

        It is the number of workers, unless there are few enough that every possible sum has a code: an even number of
        workers has even sums, and code 1 is 2; an odd number has odd sums, and code 1 is 1. A sum divided by this,
        times the number of levels, is then exact in any arithmetic, because the quotient of the two is a power of two.
        """
        levels, distance = uniform_levels(self.bits), 1 + (self.workers + 1) % 2
        reach = levels * distance if self.workers <= levels * distance else self.workers
        return np.full(tile_count, reach, np.float32)


def _sum_of_signs(votes: Sequence[Any], elements: int, kernels: Any) -> Any:
    """Return the exact sum of the workers' signs, float32.

    It is computed as a mean of a power of two of arrays, because the inverse of a power of two is exact.
    """
    arrays_needed = 1 << (len(votes) - 1).bit_length()

    def decoded(words: Any, magnitude: float) -> Any:
        return kernels.decode_signs(words, magnitude, kernels.empty(elements))

    arrays = [decoded(words, float(arrays_needed)) for words in votes]
    if arrays_needed > len(votes):
        arrays += [decoded(votes[0], 0.0)] * (arrays_needed - len(votes))
    return kernels.mean(arrays)
