"""Integer sums of rotated gradients modulo 2^width, in numpy: the specification.

All workers rotate a bucket (a tile, as in `horovod_quant.kernels.rotation`) by the same signs. With d elements the
coordinates are ``z = H D2 H D1 (x / d)``, a rotation without a change of length.

1. *Rounding*: ``floor(z / step + u)``, with 24 random bits for u.
2. *Words*: the integers are packed as in any sum (`reference.pack_sum`), but need not fit their fields. Words are added
   modulo 2^32, so only the sum has to fit, from ``-2^(width-1)`` to ``2^(width-1) - 1``.
3. *Check*: the workers also add, modulo 2^32, a weighted sum of each bucket's integers. A sum that overflowed its field
   has a different check after unpacking, and the next field of its word, perhaps of another bucket, is off by one. One
   or two such sums in a bucket always change its check, by the choice of weights; more of them change it except with a
   probability of about 2^(width-32).
"""

from __future__ import annotations

import numpy as np

from horovod_quant.kernels.keys import Key, hash32
from horovod_quant.kernels.layout import TILE, tiles
from horovod_quant.kernels.reference import (
    _store,
    as_float32,
    pack_sum,
    store_float32,
    unpack_sum,
)
from horovod_quant.kernels.rotation import grids, rotated, rotated_back, rotated_elements

WEIGHTS = hash32(0, TILE, Key(0, 0)) | np.uint32(1)
"""Weights of a bucket's integers in its check: odd, so that no multiple of 2^width vanishes."""

LARGEST_QUOTIENT = np.float32(2.0**22)
"""Limit of ``z / step`` for its conversion to an integer; no chosen step size reaches it."""

_FRACTION = np.float32(2.0**24)


def rotated_samples(
    x: np.ndarray, samples: int, key: Key, start: int = 0, out: np.ndarray | None = None
) -> np.ndarray:
    """Return the first coordinates of each bucket, float32, padded with zeros.

    Args:
        x: flat array of a gradient's dtype.
        samples: number of coordinates per bucket.
        key: selects the signs.
        start: index of the first element, a multiple of 1,024.
        out: memory for the result.
    """
    found = np.zeros((tiles(len(x)), samples), np.float32)
    for values, first in grids(as_float32(x), start):
        row = (first - start) // TILE
        z = _rotated(values, key, first)
        taken = min(samples, z.shape[1])
        found[row : row + len(z), :taken] = z[:, :taken]
    return _store(found.reshape(-1), out)


def encode_rotated_sum(
    x: np.ndarray,
    steps: np.ndarray,
    width: int,
    signs: Key,
    key: Key,
    start: int = 0,
    out: np.ndarray | None = None,
    checks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Rotate, round to multiples of a step size, and pack.

    Args:
        x: flat array of a gradient's dtype.
        steps: float32 step size of each bucket; where one is 0 or not finite, the integers are 0.
        width: width of a field, in bits.
        signs: selects the signs of the rotation.
        key: selects the random bits of the rounding.
        start: index of the first element, a multiple of 1,024.
        out, checks: memory for the results.

    Returns:
        The words, and the buckets' checks (int32).
    """
    check_steps(len(steps), len(x))
    digits = [np.zeros(0, np.int32)]
    for values, first in grids(as_float32(x), start):
        row = (first - start) // TILE
        step = steps[row : row + len(values), None]
        with np.errstate(all="ignore"):
            y = _rotated(values, signs, first) * (np.float32(1) / step)
            y = np.where(y < LARGEST_QUOTIENT, y, LARGEST_QUOTIENT)
            y = np.where(y > -LARGEST_QUOTIENT, y, -LARGEST_QUOTIENT)
        y = np.where((step > 0) & (step < np.inf), y, np.float32(0))
        whole = np.rint(y)
        fraction = ((y - whole) * _FRACTION).astype(np.int32)
        random = (hash32(first, y.size, key) >> np.uint32(8)).astype(np.int32).reshape(y.shape)
        digits.append((whole.astype(np.int32) + ((fraction + random) >> np.int32(24))).reshape(-1))
    every = np.concatenate(digits)
    return pack_sum(every, width, out), _store(_checks(every), checks)


def rotated_sum_checks(words: np.ndarray, width: int, elements: int) -> np.ndarray:
    """Return the checks of the integers in a sum's words, int32."""
    return _checks(unpack_sum(words, width, rotated_elements(elements)))


def decode_rotated_sum(
    words: np.ndarray,
    steps: np.ndarray,
    width: int,
    signs: Key,
    factor: float,
    out: np.ndarray,
    start: int = 0,
) -> np.ndarray:
    """Write the elements of a sum times a factor.

    Inverts `encode_rotated_sum` with the same signs and start. Writes NaN where a step size is NaN.
    """
    check_steps(len(steps), len(out))
    digits = unpack_sum(words, width, rotated_elements(len(out)))
    decoded = [np.zeros(0, np.float32)]
    for part, first in grids(digits.astype(np.float32), start):
        at = (first - start) // TILE
        with np.errstate(over="ignore", invalid="ignore"):
            units = steps[at : at + len(part), None] * np.float32(factor) * np.float32(1 / part.shape[1])
            decoded.append((rotated_back(part, signs, first) * units).reshape(-1))
    return store_float32(np.concatenate(decoded)[: len(out)], out)


def _rotated(x: np.ndarray, key: Key, first: int) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return rotated(x * np.float32(1 / x.shape[1]), key, first)


def _checks(digits: np.ndarray) -> np.ndarray:
    grid = np.zeros((tiles(len(digits)), TILE), np.uint32)
    grid.reshape(-1)[: len(digits)] = digits.view(np.uint32)
    return (grid * WEIGHTS).sum(axis=1, dtype=np.uint32).view(np.int32)


def check_steps(count: int, elements: int) -> None:
    if count < tiles(elements):
        raise ValueError(f"steps: {count} step sizes for {elements} elements; {tiles(elements)} are needed")
