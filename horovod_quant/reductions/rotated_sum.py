"""Integer allreduce after a common rotation: only sums must fit their fields.

With one scale for all workers a field has room for a sum that hardly occurs, of equal gradients: 64 workers have one
level of 8 bits. After a rotation common to all workers each coordinate of the *sum* is nearly normally distributed, for
any gradients, and an estimate of the sum's norm gives the necessary range.

The signs of the rotation depend on the tensor and are the same in all steps, because the workers' step counts may
differ. The rounding makes averages unbiased, with new random bits in each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from horovod_quant.codecs.arguments import is_correlated
from horovod_quant.codecs.rotated_sum_steps import LEAST_SHARE, SAMPLES, estimate_margin, rotated_sum_step
from horovod_quant.kernels.arrays import Part, no_part
from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import TILE, ceil_div, split_points, sum_words, tiles
from horovod_quant.kernels.reference import MIN_NORM, as_float32, store_float32
from horovod_quant.kernels.rotation import rotated_elements
from horovod_quant.reductions.base import Reduction, worker_rounder
from horovod_quant.reductions.integer_allreduce import bytes_between
from horovod_quant.reductions.requests import Allreduce, Collective, Workers, validated
from horovod_quant.reductions.tensors import Decoded, Exchange, Gradient

BUCKETS_OF_AN_ESTIMATE = 16
SHARED = BUCKETS_OF_AN_ESTIMATE * TILE
"""Number of elements that share an estimate, and are NaN together."""

_EXACT_BITS = 60
"""Bits of a resent sum; three more are for an estimate that was rounded down."""

_STEP_BITS = np.uint32(0xFFFFF000)
"""Kept bits of a step size: others may depend on a transport's order of additions."""


class _Pieces(NamedTuple):
    """Consecutive buckets, in groups of equal size that share an estimate."""

    first: int
    buckets: int
    groups: int

    @property
    def samples(self) -> int:
        """Number of samples per bucket."""
        return ceil_div(SAMPLES, self.buckets // self.groups)

    @property
    def all_samples(self) -> int:
        return self.buckets * self.samples


def _pieces(elements: int) -> list[_Pieces]:
    """Return the buckets of whole groups of 16, and the remaining ones."""
    whole, rest = divmod(tiles(elements), BUCKETS_OF_AN_ESTIMATE)
    found = []
    if whole:
        found.append(_Pieces(0, whole * BUCKETS_OF_AN_ESTIMATE, whole))
    if rest:
        found.append(_Pieces(whole * BUCKETS_OF_AN_ESTIMATE, rest, 1))
    return found


def _sign_key(gradient: Gradient) -> Key:
    return gradient.keys.key("rotation", 0)


@dataclass(frozen=True)
class RotatedSum(Reduction):
    """Rotated sum: allreduce norms and samples, then integers, then exact overflowed sums.

    1. The norms are those of buckets of 1,024 elements; the samples, some rotated coordinates, estimate the energy of
       the sum by that of the gradients, for 16 neighbouring buckets at a time. They give each bucket's step size, see
       `horovod_quant.codecs.rotated_sum_steps`.
    2. The integers are multiples of the step size, in words that are added modulo 2^32. Checks of the buckets, in the
       same array, show all workers where a sum has overflowed its field.
    3. The elements of those buckets are resent as integers of 64 bits; usually there are none.

    Received words cannot be passed on: the exact sums have no codes.

    Args:
        bits: width of a field.
        rounding: ``"correlated"`` or ``"independent"``.
    """

    bits: int
    rounding: str

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return (
            Collective(Allreduce, "float64", "sum"),
            Collective(Allreduce, "int32", "sum"),
            Collective(Allreduce, "int64", "sum"),
        )

    def run(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        bits = self.bits
        counts = [tiles(gradient.elements) for gradient in gradients]
        known_parts = [_known_parts(gradient, kernels) for gradient in gradients]
        known_at = tuple(split_points([sum(length for length, _, _ in parts) for parts in known_parts]))
        known = kernels.pack([*chain.from_iterable(known_parts), no_part(np.float64)])
        known = yield from validated(Allreduce(known, "sum", bytes_between(known_at, 8)), workers)
        step = rotated_sum_step(bits, workers.size, self.rounding)
        rounder = worker_rounder("worker", workers, is_correlated(self.rounding))
        energies = [known[at : at + count] for at, count in zip(known_at, counts)]
        steps = [
            _steps(known[known_at[i] : known_at[i + 1]], gradient.elements, workers.size, step)
            for i, gradient in enumerate(gradients)
        ]

        word_counts = [sum_words(rotated_elements(gradient.elements), bits) for gradient in gradients]
        at = tuple(split_points([words + count for words, count in zip(word_counts, counts)]))
        parts: list[Part] = []
        for i, gradient in enumerate(gradients):
            key = rounder.key(gradient.keys, gradient.step)
            parts += _sum_parts(gradient, steps[i], bits, key, kernels)
        words = kernels.pack([*parts, (1, np.int32, lambda out: np.ones(1, np.int32))])
        words = yield from validated(Allreduce(words, "sum", bytes_between(at, 4)), workers)
        sums = [words[at[i] : at[i] + word_counts[i]] for i in range(len(gradients))]

        overflowed = []
        for i, gradient in enumerate(gradients):
            found = kernels.rotated_sum_checks(sums[i], bits, gradient.elements)
            sent = words[at[i] + word_counts[i] : at[i + 1]]
            overflowed.append(np.flatnonzero((found != sent) & (steps[i] > 0) & (steps[i] < np.inf)).tolist())
        exact = yield from _resend(gradients, overflowed, energies, workers, kernels)

        # Data of the gradients for decoding, without their values, which must not be kept.
        sources = [(_sign_key(gradient), gradient.start) for gradient in gradients]

        def write(i: int, factor: float, out: Any) -> Any:
            signs, start = sources[i]
            kernels.decode_rotated_sum(sums[i], steps[i], bits, signs, factor, out, start)
            for bucket, values in zip(overflowed[i], exact[i]):
                with np.errstate(over="ignore"):
                    store_float32(
                        (values * factor).astype(np.float32), out[bucket * TILE : (bucket + 1) * TILE]
                    )
            return out

        return Decoded(words[-1], write, [len(buckets) for buckets in overflowed])


# ---- step sizes


def _known_parts(gradient: Gradient, kernels: Any) -> list[Part]:
    """Return the parts of the buckets' squared norms and first coordinates."""
    values, elements = gradient.values, gradient.elements

    def samples(pieces: _Pieces, out: Any) -> Any:
        low, high = pieces.first * TILE, (pieces.first + pieces.buckets) * TILE
        start = gradient.start + low
        return kernels.rotated_samples(values[low:high], pieces.samples, _sign_key(gradient), start)

    norms: Part = (tiles(elements), np.float64, partial(kernels.bucket_square_sums, values, TILE))
    return [norms, *((each.all_samples, np.float64, partial(samples, each)) for each in _pieces(elements))]


def _steps(known: np.ndarray, elements: int, size: int, step: float) -> np.ndarray:
    """Return each bucket's step size, float32.

    It is 0 for zeros, NaN near non-finite elements.
    """
    count = tiles(elements)
    energies, samples = known[:count], known[count:]
    dimensions = np.full(count, TILE, np.int64)
    if elements % TILE:
        dimensions[-1] = rotated_elements(elements % TILE)
    with np.errstate(all="ignore"):
        norms = np.sqrt(energies).astype(np.float32)
        counts_as_zero = norms < MIN_NORM
        inverse = np.where(counts_as_zero, 0.0, dimensions / np.where(counts_as_zero, 1.0, energies))
        found = [np.zeros(0, np.float32)]
        for pieces in _pieces(elements):
            own = slice(pieces.first, pieces.first + pieces.buckets)
            together = (pieces.groups, -1)
            grid = samples[: pieces.all_samples].reshape(pieces.groups, -1, pieces.samples)
            samples = samples[pieces.all_samples :]
            shares = _sums(np.square(grid) * inverse[own].reshape(*together, 1))
            taken = np.minimum(pieces.samples, dimensions[own]) * ~counts_as_zero[own]
            numbers = taken.reshape(together).sum(axis=1)
            margins = [estimate_margin(number) if number else 1.0 for number in numbers.tolist()]
            share = np.array(margins) * np.maximum(shares / np.maximum(numbers, 1), LEAST_SHARE)
            share = np.where((norms[own] < np.inf).reshape(together).all(axis=1), share, np.nan)
            share = np.where(share > size, float(size), share)  # Cauchy and Schwarz's
            room = energies[own] / dimensions[own] * np.repeat(share, pieces.buckets // pieces.groups)
            found.append((step * np.sqrt(room)).astype(np.float32))
        steps = (np.concatenate(found).view(np.uint32) & _STEP_BITS).view(np.float32)
        steps = np.where(steps < np.inf, steps, np.float32(np.nan))
    return np.where(counts_as_zero & ~np.isnan(steps), np.float32(0), steps)


def _sums(grid: np.ndarray) -> np.ndarray:
    """Return sums over all but the first axis, in fixed order."""
    flat = grid.reshape(len(grid), -1)
    return np.cumsum(flat, axis=1)[:, -1]


# ---- the sum


def _sum_parts(gradient: Gradient, steps: np.ndarray, bits: int, key: Key, kernels: Any) -> list[Part]:
    """Return the parts of the words and the checks."""
    checks: list[Any] = []

    def encode(out: Any) -> Any:
        words, found = kernels.encode_rotated_sum(
            gradient.values, steps, bits, _sign_key(gradient), key, gradient.start, out
        )
        checks.append(found)
        return words

    elements = gradient.elements
    return [
        (sum_words(rotated_elements(elements), bits), np.int32, encode),
        (tiles(elements), np.int32, lambda out: checks.pop()),
    ]


# ---- resent buckets


def _resend(
    gradients: Sequence[Gradient],
    overflowed: list[list[int]],
    energies: list[np.ndarray],
    workers: Workers,
    kernels: Any,
) -> Any:
    """Allreduce the overflowed buckets; return their exact sums, float64, for each gradient."""
    pieces = [(i, bucket) for i, buckets in enumerate(overflowed) for bucket in buckets]
    lengths = [min(TILE, gradients[i].elements - bucket * TILE) for i, bucket in pieces]
    units = [_unit(float(energies[i][bucket]), workers.size) for i, bucket in pieces]

    def integers(k: int, out: Any) -> np.ndarray:
        i, bucket = pieces[k]
        values = as_float32(gradients[i].values[bucket * TILE : bucket * TILE + lengths[k]])
        with np.errstate(all="ignore"):
            return np.rint(values.astype(np.float64) / units[k]).astype(np.int64)

    parts: list[Part] = [(length, np.int64, partial(integers, k)) for k, length in enumerate(lengths)]
    # Never empty: not every transport takes an array without elements.
    array = kernels.pack([*parts, (1, np.int64, lambda out: np.zeros(1, np.int64))])
    sizes = [0] * len(gradients)
    for (i, _), length in zip(pieces, lengths):
        sizes[i] += 8 * length
    total = yield from validated(Allreduce(array, "sum", sizes), workers)
    found: list[list[np.ndarray]] = [[] for _ in gradients]
    for (i, _), at, length, unit in zip(pieces, split_points(lengths), lengths, units):
        found[i].append(total[at : at + length].astype(np.float64) * unit)
    return found


def _unit(energy: float, size: int) -> float:
    """Return a power of two as unit with room for sums (Cauchy-Schwarz)."""
    return math.ldexp(1.0, math.frexp(math.sqrt(size) * math.sqrt(energy))[1] - _EXACT_BITS)
