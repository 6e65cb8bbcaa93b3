"""Sums in a fixed order, and what follows from them for a whole tensor, for the numpy and native backends.

Sums have 24 significant bits. So the product of two of them is exact in float64, and no compiler changes a result by
joining a multiplication and an addition.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_quant.kernels.layout import TILE, WHOLE_TENSOR

_DROPPED_BITS = 29
_ABS = np.uint64(0x7FFFFFFFFFFFFFFF)
_INF_BITS = np.uint64(0x7FF0000000000000)


def to_24_bits(values: np.ndarray) -> np.ndarray:
    """float64 values rounded to 24 significant bits, halves away from zero; inf for what is not finite."""
    bits = np.ascontiguousarray(values).view(np.uint64)
    finite = (bits & _ABS) < _INF_BITS
    dropped = np.uint64(_DROPPED_BITS)
    bits = ((bits + (np.uint64(1) << (dropped - np.uint64(1)))) >> dropped) << dropped
    return np.where(finite, bits.view(np.float64), np.inf)


def inverse_count(elements: int) -> float:
    """``1 / elements`` with 24 significant bits; 0 for none."""
    return float(to_24_bits(np.array([1 / elements]))[0]) if elements else 0.0


def in_a_tree(sums: np.ndarray) -> np.ndarray:
    """The sum of float64 numbers, an array of one: the second half is added to the first until one is left."""
    if not len(sums):
        return np.zeros(1)
    while len(sums) > 1:
        half = (len(sums) + 1) // 2
        upper = np.zeros(half)
        upper[: len(sums) - half] = sums[half:]
        sums = sums[:half] + upper
    return sums


def tensor_maximum(kernels: Any, x: np.ndarray) -> np.ndarray:
    """Largest magnitude of all elements, float32, an array of one; inf where one is not finite, 0 of none."""
    return kernels.bucket_maxima(x, WHOLE_TENSOR) if len(x) else np.zeros(1, np.float32)


def tensor_mean_magnitude(kernels: Any, x: np.ndarray) -> np.ndarray:
    """Mean magnitude of all elements, float32, an array of one; inf where one is not finite, 0 of none.

    The sums of the tiles of 1,024 are added in a tree.
    """
    with np.errstate(over="ignore"):
        total = to_24_bits(in_a_tree(kernels.bucket_magnitude_sums(x, TILE)))
        return (total * inverse_count(len(x))).astype(np.float32)


def tensor_deviation(kernels: Any, x: np.ndarray) -> np.ndarray:
    """Standard deviation of all elements about their mean, float32, an array of one.

    ``sqrt(mean of squares - mean^2)``, whose error is below 2^-10 of the root of the mean square: what is to be exact
    for elements that hardly differ needs another formula. inf where an element is not finite, 0 of none.
    """
    inverse = inverse_count(len(x))
    with np.errstate(over="ignore", invalid="ignore"):
        mean = to_24_bits(to_24_bits(in_a_tree(kernels.bucket_sums(x, TILE))) * inverse)
        squares = to_24_bits(in_a_tree(kernels.bucket_square_sums(x, TILE)))
        variance = squares * inverse - mean * mean
        deviation = kernels.norms_of_square_sums(np.where(variance > 0, variance, 0.0))
    return np.where(squares < np.inf, deviation, np.float32(np.inf))
