"""Proved variances and ranges of each scheme.

Lengths are in `proofs.code_lengths`. Exact values are computed for a given vector; bounds hold for every vector. Unless
a function says otherwise, variances are sums over elements of ``E (estimate - value)**2``, in the square of the
gradient's unit. All functions compute in float64, and none draws random numbers.

``s`` is the number of non-zero levels of a uniform set ``0, 1/s, ..., 1``, and the exponent of the smallest
non-zero level of an exponential set ``0, 2^-s, ..., 1/2, 1``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from horovod_quant.codecs.arguments import is_correlated
from horovod_quant.codecs.rounding_error import correlated_dither, level_set, rounding_variance
from proofs.arguments import exponent, flat, positive_int

_Floats = npt.NDArray[np.float64]


# ---- stochastic rounding


def uniform_rounding_variance(v: npt.ArrayLike, norm: float, s: int) -> float:
    """Exact variance of stochastic rounding to uniform levels.

    ``E||Q(v) - v||^2`` for ``Q(v_j) = norm sign(v_j) xi(|v_j| / norm)``.

    Args:
        v: gradient of one bucket, [B], finite.
        norm: scale, at least ``max |v_j|``; 0 only for a zero bucket.
        s: number of non-zero levels.

    Returns:
        Variance summed over the bucket, in the square of the unit of ``v``.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Source: QSGD, section 3.1 (norm 2 or max); Global-QSGD, standard dithering (its global norm).
    """
    return _scaled_variance(v, norm, level_set("uniform", positive_int("s", s)))


def exponential_rounding_variance(v: npt.ArrayLike, norm: float, s: int) -> float:
    """Exact variance of stochastic rounding to exponential levels.

    ``E||Q(v) - v||^2`` as in `uniform_rounding_variance`.

    Args:
        v: gradient of one bucket, [B], finite.
        norm: scale, at least ``max |v_j|``; 0 only for a zero bucket.
        s: exponent of the smallest non-zero level.

    Returns:
        Variance summed over the bucket, in the square of the unit of ``v``.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Source: NUQSGD (JMLR 2021). In Global-QSGD's exponential dithering it is the first rounding alone; the
    re-rounding inside the reduction adds to it.
    """
    return _scaled_variance(v, norm, level_set("exponential", exponent(s) + 1))


def correlated_rounding_variance(fractions: npt.ArrayLike, steps: npt.ArrayLike = 1.0) -> _Floats:
    """Exact variance of the sum of correlated roundings.

    It is that of ``sum_i steps_i floor(fractions_i + u_i)``, where the workers draw correlated u_i.

    Worker i rounds a value that lies ``fractions_i`` of the way from one level to the next, ``steps_i`` above. Its u_i
    is ``frac(c U + a)`` with c = 1, -1 or -2, where U is one uniform number. Then
    ``floor(f + u) - f = u - frac(f + u)``, and by the Fourier series of frac ``cov(frac(c U + s), frac(d U + t))``
    is ``b(s - t)`` for c = d, ``-b(s + t)`` for c = -d, where ``b(x) = 1/12 - frac(x) (1 - frac(x)) / 2``, and
    ``-+ b(2 s +- t) / 2`` for c = +-1 and d = -2. For two workers with equal steps it is ``x (1 - x)``, where x is
    the fraction of the sum.

    Args:
        fractions: those of each worker, [n, ...], each in [0, 1].
        steps: an array of the same shape, or one that broadcasts to it.

    Returns:
        float64 array of the shape after the first axis, in the square of the steps' unit.

    Raises:
        ValueError: there are no workers.

    Source: `horovod_quant.kernels.keys.RngKey.correlated`; derived in this docstring.
    """
    f = _stacked("fractions", fractions)
    widths = np.broadcast_to(np.asarray(steps, np.float64), f.shape)
    dithers = [correlated_dither(rank, len(f)) for rank in range(len(f))]
    total = np.asarray((widths**2 * f * (1 - f)).sum(axis=0))
    for i, (c, a) in enumerate(dithers):
        for j, (d, b) in enumerate(dithers[:i]):
            covariance = (
                _covariance(c, a, d, b)
                - _covariance(c, a + f[i], d, b)
                - _covariance(c, a, d, b + f[j])
                + _covariance(c, a + f[i], d, b + f[j])
            )
            total += 2 * widths[i] * widths[j] * covariance
    return total


def _covariance(c: int, s: _Floats | float, d: int, t: _Floats | float) -> _Floats | float:
    """Return the covariance of ``frac(c U + s)``, ``frac(d U + t)``.

    See `correlated_rounding_variance`.
    """
    if abs(c) > abs(d):
        c, s, d, t = d, t, c, s
    sign = 1 if c * d > 0 else -1
    ratio = abs(d // c)
    x = np.mod(ratio * s - sign * t, 1.0)
    return sign * (1 / 12 - x * (1 - x) / 2) / ratio


# ---- QSGD and NUQSGD


def qsgd_variance_factor(bucket: int, s: int) -> float:
    """QSGD's bound on the relative variance, for the 2-norm only.

    ``E||Q(v) - v||^2 / ||v||_2^2`` is at most ``min(B/s^2, sqrt(B)/s)``.

    Args:
        bucket: number of elements ``B``.
        s: number of non-zero uniform levels.

    Returns:
        A ratio of variances, without unit.

    Raises:
        TypeError, ValueError: an argument is not a positive integer.

    Source: QSGD, Lemma 3.1.
    """
    bucket, s = positive_int("bucket", bucket), positive_int("s", s)
    return min(bucket / s**2, math.sqrt(bucket) / s)


def qsgd_dense_variance_factor(bucket: int, s: int) -> float:
    """The dense half of QSGD's bound, with its constant.

    It is ``B / (4 s^2)``, by ``x (1 - x) <= 1/4``. Unlike the whole lemma it bounds ``E||Q(v) - v||^2 / norm^2`` for
    any norm that bounds the elements, so it holds for QSGDinf with ``norm = ||v||_inf``. Equality is reached if every
    element is midway between two levels.

    Args:
        bucket: number of elements ``B``.
        s: number of non-zero uniform levels.

    Returns:
        A ratio of variances, without unit.

    Raises:
        TypeError, ValueError: an argument is not a positive integer.

    Source: QSGD, proof of Lemma 3.1, with 1/4 in place of 1.
    """
    bucket, s = positive_int("bucket", bucket), positive_int("s", s)
    return bucket / (4 * s**2)


def nuqsgd_variance_factor(bucket: int, s: int) -> float:
    """A bound on NUQSGD's relative variance, for the 2-norm only.

    ``E||Q(v) - v||^2 / ||v||_2^2`` is at most ``1/8 + 2 k^2 / 9``, or ``k - 1`` where ``k = 2^-s sqrt(B)`` is 9/4 or
    more.

    Let ``||v|| = 1``. An element r between ``p`` and ``2p`` has a variance of at most ``r^2 / 8`` (at ``r = 4p/3``);
    one below ``2^-s`` has ``2^-s r - r^2``. Let x be the sum of the squares of the latter; their sum is at most
    ``sqrt(B x)``. So the variance is at most ``(1 - x)/8 + k sqrt(x) - x``, which is largest at
    ``sqrt(x) = 4k/9``, or at 1 if that exceeds 1. Equal magnitudes reach ``k - 1``.

    Args:
        bucket: number of elements ``B``.
        s: exponent of the smallest non-zero level.

    Returns:
        A ratio of variances, without unit.

    Raises:
        TypeError, ValueError: an argument is not an integer in range.

    Source: derived in this docstring; `nuqsgd_paper_variance_factor` is that of the paper, which is larger.
    """
    k = _times_the_smallest_level(bucket, s)
    return k - 1 if k >= 9 / 4 else 1 / 8 + 2 * k**2 / 9


def nuqsgd_paper_variance_factor(bucket: int, s: int) -> float:
    """The paper's bound on NUQSGD's relative variance.

    It is ``1/8 + k^2 / 4``, or ``k - 7/8`` where ``k = 2^-s sqrt(B)`` is 2 or more. As in `nuqsgd_variance_factor`,
    with ``1/8`` in place of ``(1 - x)/8``.

    Args:
        bucket: number of elements ``B``.
        s: exponent of the smallest non-zero level.

    Returns:
        A ratio of variances, without unit.

    Raises:
        TypeError, ValueError: an argument is not an integer in range.

    Source: NUQSGD (JMLR 2021), the theorem on variance.
    """
    k = _times_the_smallest_level(bucket, s)
    return k - 7 / 8 if k >= 2 else 1 / 8 + k**2 / 4


def _times_the_smallest_level(bucket: int, s: int) -> float:
    """Return ``2^-s sqrt(B)``."""
    return math.ldexp(math.sqrt(positive_int("bucket", bucket)), -exponent(s))


# ---- Global-QSGD


class ErrorBounds(NamedTuple):
    """Two bounds on the same variance; the smaller is the tighter.

    In the square of the gradient's unit.
    """

    dense: float
    sparse: float


def global_scale(gradients: npt.ArrayLike, norm: str) -> float:
    """The scale ``N`` that all workers share.

    Args:
        gradients: one bucket of every worker, [n, B], finite.
        norm: ``"max"`` (largest magnitude anywhere) or ``"l2"`` (2-norm over workers and elements).

    Returns:
        ``N``, in the unit of the gradients.

    Raises:
        ValueError: ``gradients`` is not a finite matrix, or ``norm`` is unknown.

    Source: Global-QSGD (2023), the global norm for ``q = p = inf`` and ``q = p = 2``.
    """
    matrix, norm = _workers(gradients), _norm(norm)
    largest = float(np.abs(matrix).max())
    if norm == "max" or not largest:
        return largest
    # Relative to the largest, no square under- or overflows and no rounding takes the norm below it.
    return largest * math.sqrt(float(((matrix / largest) ** 2).sum()))


def global_qsgd_error(gradients: npt.ArrayLike, s: int, norm: str, rounding: str = "correlated") -> float:
    """Exact ``E||estimate - average||^2`` of Global-QSGD with uniform levels.

    Args:
        gradients: one bucket of every worker, [n, B], finite.
        s: number of non-zero levels.
        norm: ``"max"`` or ``"l2"``.
        rounding: ``"correlated"``, or the paper's ``"independent"``.

    Returns:
        Variance summed over the bucket, in the square of the unit of the gradients.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Source: Global-QSGD (2023), standard dithering; `correlated_rounding_variance`.
    """
    matrix, s = _workers(gradients), positive_int("s", s)
    scale = global_scale(matrix, norm)
    if not is_correlated(rounding):
        return uniform_rounding_variance(matrix.ravel(), scale, s) / len(matrix) ** 2
    if not scale:
        return 0.0
    step = scale / s
    return step**2 * float(correlated_rounding_variance(np.mod(matrix / step, 1.0)).sum()) / len(matrix) ** 2


def global_qsgd_error_bounds(
    gradients: npt.ArrayLike, s: int, norm: str, rounding: str = "correlated"
) -> ErrorBounds:
    """The two bounds on ``global_qsgd_error``.

    For independent rounding ``dense`` is ``B N^2 / (4 n s^2)``, from ``x (1 - x) <= 1/4``; ``sparse`` is
    ``N / (s n^2) sum_i ||g_i||_1``, from ``x (1 - x) <= x``. Both hold for either scale ``N``.

    Correlated rounding is better on average, but not for every vector: the errors of pairs whose differences equal
    those of their random numbers add up. The sums of the n // 2 pairs (or pairs and a triple) have a variance of at
    most 1/4 each (a triple: 1), and no more than with independent rounding (a triple: three times that); at worst
    their deviations add up. So the bounds are ``dense * m^2 / (4 n)`` with m = n, or n + 1 for odd n, and ``sparse``
    times n // 2, or three times that for odd n. For one worker they are the same.

    Args:
        gradients: one bucket of every worker, [n, B], finite.
        s: number of non-zero levels.
        norm: ``"max"`` or ``"l2"``.
        rounding: ``"correlated"``, or the paper's ``"independent"``.

    Returns:
        Both bounds, in the square of the unit of the gradients.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Source: Global-QSGD (2023), standard dithering; for correlated rounding derived in this docstring.
    """
    matrix, s = _workers(gradients), positive_int("s", s)
    n, bucket = matrix.shape
    scale = global_scale(matrix, norm)
    dense = bucket * scale**2 / (4 * n * s**2)
    sparse = scale * float(np.abs(matrix).sum()) / (s * n**2)
    if not is_correlated(rounding) or n == 1:
        return ErrorBounds(dense, sparse)
    return ErrorBounds(dense * (n + n % 2) ** 2 / (4 * n), sparse * (n // 2) * (3 if n % 2 else 1))


def global_qsgd_sum_limit(workers: int, s: int, norm: str) -> int:
    """Largest magnitude that the sum of the workers' integers can have.

    For the max norm it is ``n s``. For ``"l2"`` it is ``floor(s sqrt(n)) + n``, by Cauchy-Schwarz and less than 1 of
    rounding up per worker, but never above ``n s``. In real arithmetic the sum stays 1 below that where ``s sqrt(n)``
    is an integer; the 1 is kept because a norm may have been rounded down.

    Args:
        workers: number of workers ``n``.
        s: number of non-zero uniform levels.
        norm: ``"max"`` or ``"l2"``.

    Returns:
        The limit, in levels. A field of ``w`` bits holds it if it is at most ``2^(w-1) - 1``.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Source: Global-QSGD (2023): its additional factor ``O(sqrt(n))`` of compression.
    """
    workers, s = positive_int("workers", workers), positive_int("s", s)
    if _norm(norm) == "max":
        return workers * s
    return min(workers * s, math.isqrt(s * s * workers) + workers)


# ---- Global-QSGD with a rotation


def rotated_sum_bias(error: float, exchanged_again: float) -> float:
    """Bound on the squared bias of a rotated sum.

    It is ``||E estimate - average||^2``, in the unit of ``error``. The rounding is unbiased. Resending a bucket,
    exactly, removes the mean of what the errors would have been there, ``E error 1[again]``, and by Cauchy-Schwarz
    ``||E error 1[again]||^2 <= P(again) E||error||^2``.

    Args:
        error: ``E||estimate - average||^2`` of a bucket if it is not resent and wrapping is undone.
        exchanged_again: how often it is resent, 0 to 1.

    Returns:
        A squared norm, in the unit of ``error``.

    Raises:
        ValueError: an argument is out of range.

    Source: derived in this docstring.
    """
    if not 0 <= exchanged_again <= 1 or error < 0:
        raise ValueError(f"error={error!r}, exchanged_again={exchanged_again!r}: no error and probability")
    return exchanged_again * error


# ---- EDEN


def energy_ratio(gradients: npt.ArrayLike) -> float:
    """The workers' mean ``||g_i||^2``, divided by n times ``||average||^2``.

    It is about 1 where gradients have nothing in common, 1/n where they are equal, and ``1 / (1 + (n - 1) rho)`` where
    they share a fraction rho of their energy.

    Args:
        gradients: those of all workers, [n, d], finite, with a non-zero average.

    Returns:
        A ratio, without unit.

    Raises:
        ValueError: ``gradients`` is not as above.
    """
    matrix = _workers(gradients)
    average = float((matrix.mean(axis=0) ** 2).sum())
    if not average:
        raise ValueError("gradients have an average of zero")
    return float((matrix**2).sum()) / len(matrix) ** 2 / average


# ---- BinSGDM


def one_bit_variance(u: npt.ArrayLike) -> _Floats:
    """Variance of the bit of each element.

    It is ``1 - u^2`` for a bit ``+1`` with probability ``(1 + u)/2``, else ``-1``.

    Args:
        u: ``m / b`` of each element, any shape, each in [-1, 1].

    Returns:
        float64 array of the same shape: variance of each bit, without unit (the bits are +-1).

    Raises:
        ValueError: an element is outside [-1, 1].

    Source: BinSGDM (Peng et al.; Birder, NeurIPS 2023), the worker's binarization.
    """
    return np.asarray(1 - _unit("u", u) ** 2)


def one_bit_average_variance(u: npt.ArrayLike) -> _Floats:
    """Variance of the average ``qbar`` of the workers' bits.

    It is ``(1/n^2) sum_i (1 - u_i^2)``.

    Args:
        u: ``m / b`` of each worker, [n, ...], each in [-1, 1].

    Returns:
        float64 array of the shape after the first axis, without unit.

    Raises:
        ValueError: ``u`` has no workers, or an element is outside [-1, 1].

    Source: BinSGDM, the server's average of independent bits.
    """
    ratios = _unit("u", _stacked("u", u))
    return np.asarray(one_bit_variance(ratios).sum(axis=0) / len(ratios) ** 2)


def one_bit_server_variance(u: npt.ArrayLike) -> _Floats:
    """Variance that the server's second binarization adds.

    It is ``E (q_server - qbar)^2 = 1 - E qbar^2``. With ``one_bit_average_variance`` it adds up to ``1 - ubar^2``, the
    variance of the bit that is sent back, where ``ubar`` is the mean of ``u`` over the workers.

    Args:
        u: ``m / b`` of each worker, [n, ...], each in [-1, 1].

    Returns:
        float64 array of the shape after the first axis, without unit.

    Raises:
        ValueError: ``u`` has no workers, or an element is outside [-1, 1].

    Source: BinSGDM, the server's binarization. The sum does not depend on how the workers' bits depend on each other:
    the bit that is sent back is +1 or -1 with mean ``ubar`` in any case, so correlated draws would gain nothing.
    """
    ratios = _unit("u", _stacked("u", u))
    return np.asarray(1 - ratios.mean(axis=0) ** 2 - one_bit_average_variance(ratios))


# ---- arguments


def _workers(gradients: npt.ArrayLike) -> _Floats:
    matrix = np.asarray(gradients, np.float64)
    if matrix.ndim != 2 or not matrix.size:
        raise ValueError(f"gradients has shape {matrix.shape}; it must be [workers, elements], neither 0")
    if not np.isfinite(matrix).all():
        raise ValueError("gradients has elements that are not finite")
    return matrix


def _stacked(name: str, value: npt.ArrayLike) -> _Floats:
    array = np.asarray(value, np.float64)
    if not array.ndim or not len(array):
        raise ValueError(f"{name} has shape {array.shape}; its first axis must be the workers")
    return array


def _unit(name: str, value: npt.ArrayLike) -> _Floats:
    array = np.asarray(value, np.float64)
    if not (np.abs(array) <= 1).all():
        raise ValueError(f"{name} has elements outside [-1, 1]")
    return array


def _norm(norm: str) -> str:
    if norm not in ("max", "l2"):
        raise ValueError(f"norm={norm!r} is unknown; use 'max' or 'l2'")
    return norm


def _scaled_variance(v: npt.ArrayLike, norm: float, levels: _Floats) -> float:
    magnitudes = np.abs(flat("v", v))
    norm = float(norm)
    largest = float(magnitudes.max(initial=0.0))
    if not (math.isfinite(norm) and norm >= largest):
        raise ValueError(f"norm={norm} must be finite and at least the largest magnitude of v, {largest}")
    if norm == 0:
        return 0.0
    return norm**2 * float(rounding_variance(magnitudes / norm, levels).sum())
