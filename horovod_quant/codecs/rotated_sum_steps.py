"""Step size of a rotated sum, by which sums fit their fields.

It determines bits on the wire and the nmse of `horovod_quant.reductions.rotated_sum`.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import numpy as np

from horovod_quant.codecs.arguments import is_correlated

OVERFLOWS = 5e-7
"""Design probability that a bucket has a sum outside its field.

It holds if the bucket's ratio of ``||sum||^2`` to ``sum ||g_i||^2`` equals its neighbours' ratio. With independent
gradients the ratio differs by 3 to 4%, which increases the probability to 1.2× to 1.4×.
"""

SAMPLES = 128
"""Maximum number of coordinates that estimate the sum's norm."""

LEAST_SHARE = 0.5
"""Smallest ``||sum||^2 / sum ||g_i||^2`` that step sizes allow for; gradients that cancel have less."""

_COORDINATES = 1024  # per bucket


@functools.lru_cache(maxsize=256)
def rotated_sum_step(bits: int, workers: int, rounding: str = "correlated") -> float:
    """Return the step size of a rotated sum.

    Its unit is the standard deviation of the sum's coordinates. It is the smallest step size for which a bucket's
    coordinates leave a field of ``-2^(b-1) .. 2^(b-1) - 1`` steps with a probability of at most `OVERFLOWS`. A
    coordinate T of the sum, in steps, is normally distributed, because of the signs of the second round. The rounding
    errors are those of pairs of workers: ``1 - x`` with probability x, otherwise ``-x``, for a fraction x of the pair's
    sum. c is the logarithm of the mean of ``exp(s error)`` over a pair's x and the errors. By Chernoff's bound ``log
    P(T + errors >= 2^(b-1)) <= min over s of s^2 / (2 step^2) + c(s) n / 2 - 2^(b-1) s``, which is set to its value for
    a single normal variable that leaves the field with equal probability, ``-z^2 / 2``.

    The errors have a variance of n / 12, or less where the step size is large compared with a worker's local
    coordinates, because an integer is then mostly 0: that is why a step size exists for any number of workers. The
    derivation assumes that workers share the energy equally, pairs are alike, and the sum has the smallest share, where
    integers vary most.

    Args:
        bits: width of a field, 2 to 8.
        workers: number of workers ``n``.
        rounding: ``"correlated"``, or ``"independent"``, where each worker's fraction replaces that of a pair.

    Returns:
        A ratio, without unit.

    Source: derived in this docstring. It assumes that the pairs' errors are independent, as they are if the gradients
    are: pairs of workers share one random number, so gradients that are multiples of one vector can correlate them.
    """
    room, exponent = float(1 << (bits - 1)), _tail_exponent()
    terms, deviation = _rounded_sums(workers, is_correlated(rounding), alike=True)
    deviation *= math.sqrt(1 / LEAST_SHARE / workers)
    normal = np.array([NormalDist().inv_cdf((k + 0.5) / 256) for k in range(256)])
    s = np.geomspace(1e-2, 12.0, 200)

    def fits(step: float) -> bool:
        x = np.mod(deviation / step * normal, 1.0)[:, None]
        errors = np.log((x * np.exp((1 - x) * s) + (1 - x) * np.exp(-x * s)).mean(axis=0))
        return float((s**2 / (2 * step**2) + terms * errors - room * s).min()) <= -exponent

    low, high = 0.0, 1.0
    while not fits(high):
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    # Coarse, so that the last bits of a library's exponential do not matter.
    return math.ceil(high * 2**12) / 2**12


@functools.lru_cache(maxsize=256)
def estimate_margin(samples: int) -> float:
    """Return the factor for a variance that is only estimated.

    It is applied to the sum's variance. With a variance estimated from N coordinates, and a margin m, the deviations
    that fit a field are ``z^2 m X / N`` instead of ``z^2``, where X has the chi-square distribution. The mean of
    ``exp(-z^2 m X / (2 N))`` is ``(1 + z^2 m / N)^(-N/2)``; m makes it ``exp(-z^2 / 2)``.

    Args:
        samples: N, at least 1.

    Returns:
        A ratio of variances, without unit; 1.17 for 128 samples.

    Source: derived in this docstring.
    """
    twice = 2 * _tail_exponent()
    if twice / samples > 700:
        return math.inf
    # Rounded, so that the last bits of a library's exponential do not matter.
    return round(samples * math.expm1(twice / samples) / twice * 2**20) / 2**20


def rotated_sum_nmse(bits: int, workers: int, rounding: str = "correlated") -> float:
    """Return the nmse ``E||estimate - average||^2 / ||average||^2`` of a rotated sum.

    For independent gradients of equal norms: the variance of the rounding times the square of the step size. It does
    not include resent buckets.

    Args:
        bits: width of a field, 2 to 8.
        workers: number of workers.
        rounding: ``"correlated"`` or ``"independent"``.

    Returns:
        A ratio of variances, without unit.

    Source: `rotated_sum_step`; for correlated rounding the variance of a pair's fraction, averaged over the fractions.
    """
    step = rotated_sum_step(bits, workers, rounding) * math.sqrt(min(estimate_margin(SAMPLES), workers))
    terms, deviation = _rounded_sums(workers, is_correlated(rounding), alike=False)
    return step**2 * terms * _fraction_variance(deviation / math.sqrt(workers) / step)


def _tail_exponent() -> float:
    """Return ``z^2 / 2`` for the design's limit z.

    A normal bucket exceeds z standard deviations with probability `OVERFLOWS`.
    """
    return NormalDist().inv_cdf(OVERFLOWS / (2 * _COORDINATES)) ** 2 / 2


def _rounded_sums(workers: int, correlated: bool, alike: bool) -> tuple[float, float]:
    """Return the number and deviation of a sum's independent roundings.

    The deviation's unit is a worker's.

    Args:
        workers: number of workers.
        correlated: True for correlated rounding, by pairs.
        alike: True if the two gradients of a pair are equal, False if they are independent.
    """
    if not correlated or workers == 1:
        return workers, 1.0
    return workers / 2, 2.0 if alike else math.sqrt(2)


def _fraction_variance(deviation: float) -> float:
    """Return the mean of ``x (1 - x)`` by its Fourier series.

    x is the fraction of a normal variable.
    """
    if deviation < 0.2:
        return deviation * math.sqrt(2 / math.pi) - deviation**2
    k = np.arange(1, 20)
    return float(1 / 6 - (np.exp(-2 * (math.pi * k * deviation) ** 2) / (math.pi * k) ** 2).sum())
