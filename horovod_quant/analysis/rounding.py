"""How much error a method's rounding adds, for gradients like white noise: what `advise` says of a method's quality.

The levels are the schemes' (`horovod_quant.schemes`); the errors are expectations, computed from the variance of
stochastic rounding, not samples of it. Real gradients have heavier tails, and larger errors.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from horovod_quant.analysis.bounds import exponential_levels, rounding_variance, uniform_levels
from horovod_quant.schemes.base import Scheme
from horovod_quant.schemes.global_qsgd import GlobalQSGD
from horovod_quant.schemes.hierarchical import Hierarchical
from horovod_quant.schemes.nuqsgd import NUQSGD
from horovod_quant.schemes.qsgd import ALLTOALL, QSGD

_VALUES = 2**16


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

    It does not depend on the number of workers where the levels do not: rounding errors average out just as such
    gradients do. At 1 the rounding adds as much noise as the gradients have themselves.
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
    variance = rounding_variance(np.minimum(values / norm, 1.0), grid)
    error = norm * np.sqrt(variance.sum() / (values**2).sum())
    # The owner of a chunk rounds the sum once more.
    again = exponential if isinstance(scheme, GlobalQSGD) else scheme.exchange == ALLTOALL
    return float(error * np.sqrt(2) if again else error)


def _largest(count: int) -> float:
    """The median of the largest magnitude of so many Gaussian values."""
    return NormalDist().inv_cdf(0.5 * (1 + 0.5 ** (1 / count)))
