"""Expected nmse for gradients like white noise, which `advise` reports.

It is computed from the variance of stochastic rounding, without sampling. Real gradients have heavier tails and a
larger nmse. `Scheme.expected_nmse` of each scheme uses it.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from horovod_quant.codecs.arguments import is_correlated
from horovod_quant.kernels.keys import ALL_ONES, RngKey

_Floats = npt.NDArray[np.float64]

_VALUES = 2**16
_NUMBERS = 2**12


def level_set(kind: str, top: int) -> _Floats:
    """Return the levels of magnitudes divided by their norm, ascending.

    Kernels have separate code.

    Args:
        kind: ``"uniform"`` for ``k / top``, or ``"exponential"`` for ``0, 2^-(top - 1), ..., 1/2, 1``.
        top: number of non-zero levels, at least 1; at most 1001 exponential ones.

    Source: QSGD (NeurIPS 2017), section 3.1; NUQSGD (JMLR 2021); both kinds of dithering in Global-QSGD (2023).
    """
    if kind == "uniform":
        return np.arange(top + 1) / top
    return np.concatenate(([0.0], np.ldexp(1.0, np.arange(1 - top, 1))))


def rounding_variance(r: npt.ArrayLike, levels: npt.ArrayLike) -> _Floats:
    """Return the exact variance of unbiased stochastic rounding.

    Each ``r`` is rounded to one of its neighbouring levels. With ``r`` between ``low`` and ``high`` it is ``(high - r)
    (r - low)``.

    Args:
        r: any shape, each in [0, 1].
        levels: ascending, from 0 to 1, at least two.

    Returns:
        float64 array of the shape of ``r``: the variance of each element, in the square of the unit of ``r``.

    Raises:
        ValueError: ``r`` is outside [0, 1], or ``levels`` is not as above.

    Source: QSGD, section 3.1 (the variance of a two-point variable).
    """
    ratios = np.asarray(r, np.float64)
    grid = np.asarray(levels, np.float64)
    if grid.size < 2 or grid[0] != 0 or grid[-1] != 1 or (np.diff(grid) <= 0).any():
        raise ValueError(f"levels={levels!r} must ascend from 0 to 1")
    if not ((ratios >= 0) & (ratios <= 1)).all():
        raise ValueError("r has elements outside [0, 1]; divide the magnitudes by a norm that bounds them")
    above = np.clip(np.searchsorted(grid, ratios, side="right"), 1, grid.size - 1)
    return np.asarray((grid[above] - ratios) * (ratios - grid[above - 1]))


def correlated_dither(rank: int, size: int) -> tuple[int, float]:
    """Return c and a of a worker's dither ``frac(c U + a)``.

    All workers share the uniform U.

    Source: `horovod_quant.kernels.keys.RngKey.correlated`.
    """
    key = RngKey(0, "").correlated("", 0, rank, size)
    sign = -1 if key.flip else 1
    return sign << key.shift, sign * key.addend / (ALL_ONES + 1)


def gaussian_nmse(
    grid: np.ndarray, norm: str, elements: int, rounding: str, workers: int, again: bool = False
) -> float:
    """Return the expected nmse for independent Gaussian gradients.

    It is ``||average - exact||^2 / ||exact||^2``. For levels that do not depend on the number of workers, and one
    rounding, it does not depend on it either, if workers draw independently or their number is even: rounding errors
    average out just as such gradients do.

    Args:
        grid: the levels, from 0 to 1, to which magnitudes divided by the norm are rounded stochastically.
        norm: ``"max"`` or ``"l2"``.
        elements: number of elements that share a norm; of all workers, if the workers share it.
        rounding: ``"correlated"`` or ``"independent"``, see `horovod_quant.schemes.base.worker_key`.
        workers: number of workers that round.
        again: True if the reducer rounds the average once more, to the same levels: it is smaller than the workers'
            values by about the root of their number.
    """
    drawing = 1
    if is_correlated(rounding):
        drawing = workers if workers % 2 else 2  # any number of pairs equals one pair
    scale, one, cancelled = _variances(np.asarray(grid, np.float64).tobytes(), norm, elements, drawing)
    square = float((_values() ** 2).mean())
    nmse = scale**2 * (one - cancelled) / square
    if again:
        ratios = np.minimum(_values() * math.sqrt((1.0 + nmse) / workers) / scale, 1.0)
        nmse += scale**2 * workers * float(rounding_variance(ratios, grid).mean()) / square
    return nmse


@functools.lru_cache(maxsize=1)
def _values() -> np.ndarray:
    return np.abs(np.random.default_rng(0).standard_normal(_VALUES))


@functools.lru_cache(maxsize=1024)
def _variances(levels: bytes, norm: str, elements: int, drawing: int) -> tuple[float, float, float]:
    """Return a norm, its rounding's variance, and the reduction by `_cancelled`."""
    grid, scale = np.frombuffer(levels), _largest(elements) if norm == "max" else math.sqrt(elements)
    ratios = np.minimum(_values() / scale, 1.0)
    return scale, float(rounding_variance(ratios, grid).mean()), _cancelled(ratios, grid, drawing)


def _cancelled(ratios: np.ndarray, grid: np.ndarray, workers: int) -> float:
    """Return the reduction of variance by correlated rounding.

    It is a worker's share of the reduction in the sum's variance. For independent gradients. Given the uniform number
    that all workers share, the workers' errors are independent, with means that depend only on the worker's local
    number u: g(u), an odd function around 1/2, as values are negative with probability 1/2. So covariances are those of
    the g(u_i), which cancel in pairs; with an odd number of workers three cancel in part.
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
    unpaired = [correlated_dither(rank, workers) for rank in range(3)] if workers % 2 else []
    left = np.sum([mean_error(np.mod(c * common + a, 1.0)) for c, a in unpaired], axis=0)
    return float(mean_error(common).var() - left.var() / workers)


def _largest(count: int) -> float:
    """Return the median of the largest magnitude of N Gaussian values."""
    return NormalDist().inv_cdf(0.5 * (1 + 0.5 ** (1 / count)))
