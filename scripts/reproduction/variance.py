"""Variance of a scheme's rounding: measured with its kernels, and exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from horovod_quant import simulator
from horovod_quant.codecs.rounding_error import level_set, rounding_variance
from horovod_quant.schemes import NUQSGD


def squared(arrays: Sequence[np.ndarray]) -> float:
    """Return the sum of all squares, in float64."""
    return float(sum(np.sum(np.square(a, dtype=np.float64)) for a in arrays))


def measured(scheme: Any, gradients: Sequence[np.ndarray], seed: int) -> float:
    """Measure ``||Q(g) - g||^2 / ||g||^2`` of one rounding by the kernels.

    All gradients of a worker count as one vector g.
    """
    done = simulator.run(scheme, [list(gradients)], seed=seed)
    differences = [q.astype(np.float64) - g for q, g in zip(done.decoded[0], gradients)]
    return squared(differences) / squared(gradients)


def expected(scheme: Any, gradients: Sequence[np.ndarray]) -> float:
    """Return the exact expectation of `measured` for QSGD and NUQSGD."""
    kind = "exponential" if isinstance(scheme, NUQSGD) else "uniform"
    levels = level_set(kind, 2 ** (scheme.bits - 1) - 1)
    return _relative(scheme, gradients, lambda ratios: rounding_variance(ratios, levels))


def expected_without_zero(scheme: NUQSGD, gradients: Sequence[np.ndarray]) -> float:
    """Return the expectation with levels 1, 1/2, ... but without 0.

    The number of bits is that of the scheme. These are the levels of the code of the NUQSGD authors. A magnitude r
    below the smallest level p becomes p or -p, with a variance of ``p^2 - r^2``.
    """
    smallest = 2 ** (scheme.bits - 1) - 1
    levels, p = level_set("exponential", smallest + 1), 2.0**-smallest
    return _relative(
        scheme,
        gradients,
        lambda ratios: np.where(ratios < p, p**2 - ratios**2, rounding_variance(ratios, levels)),
    )


def _relative(scheme: Any, gradients: Sequence[np.ndarray], variance: Callable[[Any], np.ndarray]) -> float:
    """Return the variance of all elements, relative to their squares.

    Args:
        variance: maps magnitudes relative to the norms of their buckets to variances.
    """
    total = 0.0
    for gradient in gradients:
        for start in range(0, len(gradient), scheme.bucket_size):
            bucket = np.abs(gradient[start : start + scheme.bucket_size].astype(np.float64))
            norm = bucket.max() if scheme.norm == "max" else np.sqrt(np.square(bucket).sum())
            if norm > 0:
                total += float(norm**2 * variance(np.minimum(bucket / norm, 1)).sum())
    return total / squared(gradients)
