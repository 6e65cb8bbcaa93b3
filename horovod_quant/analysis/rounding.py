"""How much error a method's rounding adds, for gradients like white noise: what `advise` says of a method's quality.

The levels are the schemes' (`horovod_quant.schemes`); the errors are expectations, computed from the variance of
stochastic rounding, not samples of it. Real gradients have heavier tails, and larger errors.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from horovod_quant.analysis.bounds import exponential_levels, joint_dither, rounding_variance, uniform_levels
from horovod_quant.schemes.base import JOINT, Scheme
from horovod_quant.schemes.global_qsgd import GlobalQSGD
from horovod_quant.schemes.hierarchical import Hierarchical
from horovod_quant.schemes.nuqsgd import NUQSGD
from horovod_quant.schemes.qsgd import ALLTOALL, QSGD

_VALUES = 2**16
_NUMBERS = 2**12


def levels_left(scheme: Scheme, workers: int, hosts: int) -> int | None:
    """Magnitudes other than zero that an element can have on the wire; None for BinSGDM, which has but signs.

    Args:
        scheme: one that serves so many workers.
        workers: whose integers are summed, by `GlobalQSGD` with uniform levels.
        hosts: the same for a hierarchical exchange.
    """
    if isinstance(scheme, Hierarchical):
        return levels_left(scheme.inner, hosts, hosts)
    if isinstance(scheme, GlobalQSGD) and scheme.levels == "uniform":
        return scheme.levels_for(workers)
    if isinstance(scheme, (GlobalQSGD, QSGD, NUQSGD)):
        return (1 << (scheme.bits - 1)) - 1
    return None


def relative_error(scheme: Scheme, workers: int, hosts: int) -> float | None:
    """``||average - exact|| / ||exact||`` to be expected for independent Gaussian gradients; None for BinSGDM.

    It does not depend on the number of workers where the levels do not, if they draw independently or their number is
    even: rounding errors average out just as such gradients do. At 1 the rounding adds as much noise as the gradients
    have themselves.
    """
    if isinstance(scheme, Hierarchical):
        return relative_error(scheme.inner, hosts, hosts)
    levels = levels_left(scheme, workers, hosts)
    if levels is None or not isinstance(scheme, (GlobalQSGD, QSGD, NUQSGD)):
        return None
    size = scheme.bucket_size
    values = np.abs(np.random.default_rng(0).standard_normal(_VALUES))
    shared = workers if isinstance(scheme, GlobalQSGD) else 1
    norm = _largest(size * shared) if scheme.norm == "max" else math.sqrt(size * shared)
    exponential = isinstance(scheme, NUQSGD) or getattr(scheme, "levels", "uniform") == "exponential"
    grid = exponential_levels(levels - 1) if exponential else uniform_levels(levels)
    ratios = np.minimum(values / norm, 1.0)
    one = float(rounding_variance(ratios, grid).mean())
    square = one - (_cancelled(ratios, grid, workers) if scheme.rounding == JOINT else 0.0)
    # The owner of a chunk rounds the sum once more.
    again = exponential if isinstance(scheme, GlobalQSGD) else scheme.exchange == ALLTOALL
    return norm * math.sqrt((square + one * again) / float((values**2).mean()))


def _cancelled(ratios: np.ndarray, grid: np.ndarray, workers: int) -> float:
    """What joint rounding takes off each worker's share of the variance of a sum, where gradients are independent.

    Given the uniform number that all have in common, the workers' errors are independent, with means that depend on
    the worker's own number u alone: g(u), an odd function around 1/2, as values are as often negative. So covariances
    are those of the g(u_i), which cancel each other in pairs; of an odd number three do in part.
    """
    if workers == 1:
        return 0.0
    above = np.clip(np.searchsorted(grid, ratios, side="right"), 1, len(grid) - 1)
    steps = grid[above] - grid[above - 1]
    fractions = (ratios - grid[above - 1]) / steps
    order = np.argsort(fractions)
    ascending = fractions[order]
    rounded_up = np.append(np.cumsum(steps[order][::-1])[::-1], 0.0) / len(steps)

    def mean_error(u: np.ndarray) -> np.ndarray:
        ups = [rounded_up[np.searchsorted(ascending, limit)] for limit in (1 - u, u)]
        return (ups[0] - ups[1]) / 2

    common = (np.arange(_NUMBERS) + 0.5) / _NUMBERS
    unpaired = [joint_dither(rank, workers) for rank in range(3)] if workers % 2 else []
    left = np.sum([mean_error(np.mod(c * common + a, 1.0)) for c, a in unpaired], axis=0)
    return float(mean_error(common).var() - left.var() / workers)


def _largest(count: int) -> float:
    """The median of the largest magnitude of so many Gaussian values."""
    return NormalDist().inv_cdf(0.5 * (1 + 0.5 ** (1 / count)))
