"""How much error rounding adds, for gradients like white noise: what `advise` says of a method's quality.

The errors are expectations, computed from the variance of stochastic rounding, not samples of it. Real gradients have
heavier tails, and larger errors. Each scheme tells its own, by `Scheme.relative_error`.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from horovod_quant.analysis.bounds import rounding_variance

_VALUES = 2**16


def gaussian_error(grid: np.ndarray, norm: str, elements: int, roundings: int = 1) -> float:
    """``||average - exact|| / ||exact||`` to be expected for independent Gaussian gradients.

    It does not depend on the number of workers where the levels do not: rounding errors average out just as such
    gradients do.

    Args:
        grid: the levels, from 0 to 1, to which magnitudes divided by the norm are rounded stochastically.
        norm: ``"max"`` or ``"l2"``.
        elements: that share a norm, those of all workers for a norm that these share.
        roundings: how often the sum is rounded on its way.
    """
    values = np.abs(np.random.default_rng(0).standard_normal(_VALUES))
    scale = _largest(elements) if norm == "max" else math.sqrt(elements)
    variance = rounding_variance(np.minimum(values / scale, 1.0), grid)
    error = scale * np.sqrt(variance.sum() / (values**2).sum())
    return float(error * np.sqrt(roundings))


def _largest(count: int) -> float:
    """The median of the largest magnitude of so many Gaussian values."""
    return NormalDist().inv_cdf(0.5 * (1 + 0.5 ** (1 / count)))
