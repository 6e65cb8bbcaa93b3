"""EDEN's kernels in numpy: the specification.

DRIVE (Vargaftik et al., NeurIPS 2021) for one bit, EDEN (Vargaftik et al., ICML 2022) for more. A bucket is a tile of
1,024 elements, and has less only at a tensor's end: there zeros fill it up to a power of two from 32 on.

1. *Range*: ``x`` times the power of two that brings the largest magnitude to 1 .. 2 (for the largest floats to 2 .. 4),
   so that no sum overflows. Elements below 2^-60 then count as zero: no square, coordinate or product is subnormal,
   which some processors and frameworks would flush to zero.
2. *Rotation*: ``z = H D2 H D1 x``. D1 and D2 are random signs, H the Walsh-Hadamard transform without a factor: stages
   h = 1, 2, 4, ..., each of which replaces elements a, b at a distance of h by ``(a + b, a - b)``, in float32. Two
   rounds, because one has a large bias where few elements of a bucket are not zero. A third would not remove the rest.
3. *Levels*: with d elements, ``z / sqrt(d ||x||^2)`` is nearly normally distributed. A coordinate's code is its sign
   (a zero of either sign counts as positive) and the number of thresholds that its magnitude exceeds; one on a
   threshold belongs to the lower level. With a trellis, levels and codes are those of trellis.py.
4. *Scale*: ``||x||^2 / <z, q>``, q the coordinates' levels; this makes the component of ``scale * (H D2 H D1)^T q``
   along x exact. It would also make the mean over uniform rotations exact; docs/rounding.md has the bound of the bias
   over the rotations here. Both sums are `lane_sums`.

A bucket whose largest magnitude is below 2^-96 counts as zeros and has scale 0, one that is not finite has scale NaN;
both have codes 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from horovod_quant.kernels.arrays import TILES_AT_A_TIME
from horovod_quant.kernels.checks import check_range
from horovod_quant.kernels.keys import Key, hash32
from horovod_quant.kernels.layout import ROW, TILE, code_words, tiles
from horovod_quant.kernels.reference import (
    MIN_NORM,
    _lanes_in_a_tree,
    _store,
    as_float32,
    bucket_maxima,
    pack_codes,
    store_float32,
    unpack_codes,
)
from horovod_quant.kernels.trellis import trellis_codes, trellis_values

LEVELS: dict[int, tuple[float, ...]] = {
    1: (0.7978846,),
    2: (0.4527800, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}
"""Positive levels for each number of bits; the others are their negatives."""

THRESHOLDS: dict[int, tuple[float, ...]] = {
    1: (),
    2: (0.9815988,),
    3: (0.5005497, 1.0499573, 1.7479275),
    4: (0.2582217, 0.5224037, 0.7995498, 1.0992858, 1.4371388, 1.8435318, 2.4008034),
}
"""Boundaries between positive levels."""

DISTORTIONS = {1: 0.363380, 2: 0.117482, 3: 0.034548, 4: 0.009501}
"""D, the levels' squared error for a standard normal variable; the kernels have ``D / (1 - D)``."""

LARGEST_SHIFT = 126  # 2^-127 is no normal number
SMALLEST = np.float32(2.0**-60)
"""Smallest magnitude that is kept if a bucket's maximum is 1 to 4."""
ROWS_OF_A_SUM = 8
"""Number of rows of which `lane_sums` adds the terms in float32."""


def rotated_elements(elements: int) -> int:
    """Return the number of coordinates of a rotated tensor."""
    rest = elements % TILE
    return elements - rest + (max(ROW, 1 << (rest - 1).bit_length()) if rest else 0)


def rotated_words(elements: int, bits: int) -> int:
    """Return the number of int32 words of a rotated tensor's codes."""
    return code_words(rotated_elements(elements), bits)


def encode_rotated(
    x: np.ndarray,
    bits: int,
    key: Key,
    start: int = 0,
    out: np.ndarray | None = None,
    scales: np.ndarray | None = None,
    trellis: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Rotate, and round to levels.

    Args:
        x: flat array of a gradient's dtype.
        bits: bits of a code, 1 to 4.
        key: selects the signs; each rounding needs a different one.
        start: index of the first element, a multiple of 1,024.
        out, scales: memory for the results.
        trellis: True if a code's level depends on the codes before it (`horovod_quant.kernels.trellis`).

    Returns:
        The codes, packed (int32 words), and the buckets' scales (float32).
    """
    check_range("bits", bits, 1, 4)
    words, found = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    for values, first in grids(as_float32(x), start):
        codes, local_scales = _encoded(values, bits, key, first, trellis)
        words.append(pack_codes(codes, bits))
        found.append(local_scales)
    return _store(np.concatenate(words), out), _store(np.concatenate(found), scales)


def decode_rotated(
    words: np.ndarray,
    scales: np.ndarray,
    bits: int,
    key: Key,
    factor: float,
    out: np.ndarray,
    start: int = 0,
    trellis: bool = False,
) -> np.ndarray:
    """Write the decoded elements times ``factor``.

    Inverts `encode_rotated` with the same key, start, trellis.
    """
    check_range("bits", bits, 1, 4)
    codes = unpack_codes(words, bits, rotated_elements(len(out)))
    units = scales * np.float32(factor)
    check_scales(len(scales), len(out))
    decoded = [np.zeros(0, np.float32)]
    for part, first in grids(codes, start):
        at = (first - start) // TILE
        with np.errstate(over="ignore", invalid="ignore"):
            values = rotated_back(_level_values(part, bits, trellis), key, first)
            decoded.append((values * units[at : at + len(part), None]).reshape(-1))
    return store_float32(np.concatenate(decoded)[: len(out)], out)


def add_rotated(
    words: Sequence[np.ndarray],
    scales: Sequence[np.ndarray],
    bits: int,
    keys: Sequence[Key],
    factor: float,
    out: np.ndarray,
    start: int = 0,
    trellis: bool = False,
) -> np.ndarray:
    """Write the sum of the workers' decoded elements times ``factor``.

    Each is decoded with that worker's key, and added in rank order.
    """
    check_workers(words, scales, keys)
    for low in range(0, len(out), TILES_AT_A_TIME * TILE):
        part = out[low : low + TILES_AT_A_TIME * TILE]
        codes = slice(code_words(low, bits), code_words(low + rotated_elements(len(part)), bits))
        total = part if part.dtype == np.float32 else np.empty(len(part), np.float32)
        more = np.empty(len(part) if len(words) > 1 else 0, np.float32)
        for worker, (worker_words, units, key) in enumerate(zip(words, scales, keys)):
            values = more if worker else total
            decoded = decode_rotated(
                worker_words[codes], units[low // TILE :], bits, key, factor, values, start + low, trellis
            )
            if worker:
                with np.errstate(over="ignore", invalid="ignore"):
                    total += decoded
        if total is not part:
            store_float32(total, part)
    return out


def grids(x: np.ndarray, start: int) -> list[tuple[np.ndarray, int]]:
    """Split into whole buckets and a padded last one.

    Each comes with the index of its first element.
    """
    whole = len(x) // TILE * TILE
    found = [(x[:whole].reshape(-1, TILE), start)] if whole else []
    if whole < len(x):
        last = np.zeros(rotated_elements(len(x)) - whole, x.dtype)
        last[: len(x) - whole] = x[whole:]
        found.append((last[None, :], start + whole))
    return found


def _level_values(codes: np.ndarray, bits: int, trellis: bool) -> np.ndarray:
    """Return the levels of codes, float32."""
    if trellis:
        return trellis_values(codes, bits, LEVELS[bits])
    magnitudes = np.array(LEVELS[bits], np.float32)[codes & np.uint32((1 << (bits - 1)) - 1)]
    return np.where(codes >> np.uint32(bits - 1), -magnitudes, magnitudes)


def _encoded(x: np.ndarray, bits: int, key: Key, first: int, trellis: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of buckets' coordinates, flat, and the buckets' scales."""
    count, size = x.shape
    maxima = bucket_maxima(x.reshape(-1), size)[:count]
    usable = (maxima >= MIN_NORM) & (maxima < np.inf)
    x = np.where(usable[:, None], x, np.float32(0))
    exponents = (maxima.view(np.int32) >> 23) - 127
    shift = np.where(usable, np.minimum(exponents, LARGEST_SHIFT), 0).astype(np.int32)
    x = x * np.ldexp(np.float32(1), -shift)[:, None]
    x = np.where(np.abs(x) < SMALLEST, np.float32(0), x)

    z = rotated(x, key, first)
    squares = lane_sums(x * x)
    unit = np.sqrt(squares * size).astype(np.float32)
    codes = trellis_codes(z, unit, bits, LEVELS[bits]) if trellis else _nearest_codes(z, unit, bits)
    codes = np.where(usable[:, None], codes, np.uint32(0))

    products = lane_sums(z * _level_values(codes, bits, trellis))
    scales = np.ldexp(squares / np.where(usable, products, 1), shift).astype(np.float32)
    scales = np.where(usable, scales, np.where(maxima < np.inf, np.float32(0), np.float32(np.nan)))
    return codes.reshape(-1), scales


def _nearest_codes(z: np.ndarray, unit: np.ndarray, bits: int) -> np.ndarray:
    magnitudes = np.abs(z)
    codes = np.zeros(z.shape, np.uint32)
    for threshold in THRESHOLDS[bits]:
        codes += magnitudes > (np.float32(threshold) * unit)[:, None]
    return codes | (z < 0).astype(np.uint32) << np.uint32(bits - 1)


def transformed(values: np.ndarray) -> np.ndarray:
    """Return the Walsh-Hadamard transform of each row."""
    count, size = values.shape
    h = 1
    while h < size:
        pairs = values.reshape(count, size // (2 * h), 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        values = np.stack([a + b, a - b], axis=2).reshape(count, size)
        h *= 2
    return values


def rotated(x: np.ndarray, key: Key, first: int) -> np.ndarray:
    """Return ``H D2 H D1 x`` of each row."""
    count, size = x.shape
    for number in range(2):
        x = transformed(x * random_signs(count, size, key, first, number))
    return x


def rotated_back(z: np.ndarray, key: Key, first: int) -> np.ndarray:
    """Return ``D1 H D2 H z`` of each row."""
    count, size = z.shape
    for number in (1, 0):
        z = transformed(z) * random_signs(count, size, key, first, number)
    return z


def random_signs(count: int, size: int, key: Key, first: int, number: int) -> np.ndarray:
    """Return random +-1 for each element.

    Bit i of hash ``2 r + number`` is set for -1 at element i of the tensor's row r.
    """
    rows = hash32(2 * (first // ROW), 2 * count * (size // ROW), key)[number::2]
    bits = rows[:, None] >> np.arange(ROW, dtype=np.uint32) & np.uint32(1)
    return (np.float32(1) - np.float32(2) * bits.astype(np.float32)).reshape(count, size)


def lane_sums(terms: np.ndarray) -> np.ndarray:
    """Return the sum of each bucket's float32 terms, float64.

    Rows are 32 elements. The terms of eight rows are added in float32, in order, with a relative error of at most 2^-21
    where terms have one sign; these sums are added in float64, into 32 lanes; and the lanes in a tree.
    """
    count, size = terms.shape
    rows = terms.reshape(count, size // ROW, ROW)
    lanes = np.zeros((count, ROW), np.float64)
    for first in range(0, size // ROW, ROWS_OF_A_SUM):
        few_rows = np.zeros((count, ROW), np.float32)
        for row in rows[:, first : first + ROWS_OF_A_SUM].swapaxes(0, 1):
            few_rows += row
        lanes += few_rows
    return _lanes_in_a_tree(lanes)


def check_scales(count: int, elements: int) -> None:
    if count < tiles(elements):
        raise ValueError(f"scales: {count} scales for {elements} elements; {tiles(elements)} are needed")


def check_workers(words: Sequence, scales: Sequence, keys: Sequence) -> None:
    if not 0 < len(words) == len(scales) == len(keys):
        raise ValueError(f"{len(words)} workers' words, {len(scales)} workers' scales, {len(keys)} keys")
