"""Fixed-order sums, statistics of whole tensors, and clipping by the L2 norm.

Sums have 24 significant bits. So the product of two of them is exact in float64, and a fused multiply-add does not
change a result.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_quant.kernels.layout import TILE, WHOLE_TENSOR

_DROPPED_BITS = 29
_ABS = np.uint64(0x7FFFFFFFFFFFFFFF)
_INF_BITS = np.uint64(0x7FF0000000000000)


def to_24_bits(values: np.ndarray) -> np.ndarray:
    """Round float64 values to 24 significant bits, halves away from zero.

    Inf for non-finite values.
    """
    bits = np.ascontiguousarray(values).view(np.uint64)
    finite = (bits & _ABS) < _INF_BITS
    dropped = np.uint64(_DROPPED_BITS)
    bits = ((bits + (np.uint64(1) << (dropped - np.uint64(1)))) >> dropped) << dropped
    return np.where(finite, bits.view(np.float64), np.inf)


def inverse_count(elements: int) -> float:
    """Return ``1 / elements`` with 24 significant bits; 0 without elements."""
    return float(to_24_bits(np.array([1 / elements]))[0]) if elements else 0.0


def in_a_tree(sums: np.ndarray) -> np.ndarray:
    """Return the sum of float64 numbers, an array of one.

    Adds the second half to the first until one is left.
    """
    if not len(sums):
        return np.zeros(1)
    while len(sums) > 1:
        half = (len(sums) + 1) // 2
        upper = np.zeros(half)
        upper[: len(sums) - half] = sums[half:]
        sums = sums[:half] + upper
    return sums


def tensor_maximum(kernels: Any, x: np.ndarray) -> np.ndarray:
    """Return the largest magnitude, float32, an array of one.

    Inf if an element is not finite, 0 without elements.
    """
    return kernels.bucket_maxima(x, WHOLE_TENSOR) if len(x) else np.zeros(1, np.float32)


def tensor_mean_magnitude(kernels: Any, x: np.ndarray) -> np.ndarray:
    """Return the mean magnitude, float32, an array of one.

    Inf if an element is not finite, 0 without elements. The sums of the tiles of 1,024 are added in a tree.
    """
    with np.errstate(over="ignore"):
        total = to_24_bits(in_a_tree(kernels.bucket_magnitude_sums(x, TILE)))
        return (total * inverse_count(len(x))).astype(np.float32)


def tensor_deviation(kernels: Any, x: np.ndarray) -> np.ndarray:
    """Return the standard deviation about the mean, float32, an array of one.

    It is ``sqrt(mean of squares - mean^2)``, with an error below 2^-10 of the root of the mean square: an exact result
    for elements that hardly differ needs another formula. inf if an element is not finite, 0 without elements.
    """
    inverse = inverse_count(len(x))
    with np.errstate(over="ignore", invalid="ignore"):
        mean = to_24_bits(to_24_bits(in_a_tree(kernels.bucket_sums(x, TILE))) * inverse)
        squares = to_24_bits(in_a_tree(kernels.bucket_square_sums(x, TILE)))
        variance = squares * inverse - mean * mean
        deviation = kernels.norms_of_square_sums(np.where(variance > 0, variance, 0.0))
    return np.where(squares < np.inf, deviation, np.float32(np.inf))


def clip(kernels: Any, x: np.ndarray, most: float) -> np.ndarray:
    """Scale ``x`` down to an L2 norm of at most ``most``.

    Returns float32 if the norm exceeds it, else ``x``. The tiles' square sums are added in a tree, so that all backends
    are bit-identical. A gradient whose norm is not finite is returned unchanged.
    """
    sums = kernels.bucket_square_sums(x, TILE)
    if not len(sums):
        return x
    norm = kernels.norms_of_square_sums(in_a_tree(sums))[0]
    if not np.float32(most) < norm < np.inf:
        return x
    values = kernels.to_float32(x, np.empty(len(x), np.float32))
    return kernels.scale([values], float(np.float32(most) / norm), values)
