"""What can be proved about each scheme: variances and ranges; lengths are in `horovod_quant.analysis.code_lengths`.

Exact values are computed for a given vector; bounds hold for every vector. Unless a function says otherwise, variances
are sums over elements of ``E (estimate - value)**2``, in the square of the gradient's unit. All functions compute in
float64, and none draws random numbers.

``s`` is the number of non-zero levels of a uniform set ``0, 1/s, ..., 1``, and the exponent of the smallest
non-zero level of an exponential set ``0, 2^-s, ..., 1/2, 1``.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from horovod_quant.analysis.arguments import exponent, positive_int
from horovod_quant.kernels import rotation, trellis
from horovod_quant.kernels.keys import ALL_ONES, KeyChain

_Floats = npt.NDArray[np.float64]


# ---- stochastic rounding


def uniform_levels(s: int) -> _Floats:
    """The levels ``k/s``, ``k = 0..s``.

    Args:
        s: number of non-zero levels, at least 1.

    Returns:
        float64[s + 1], ascending, without unit.

    Raises:
        TypeError, ValueError: ``s`` is not a positive integer.

    Source: QSGD (NeurIPS 2017), section 3.1; standard dithering in Global-QSGD (2023).
    """
    s = positive_int("s", s)
    return np.arange(s + 1) / s


def exponential_levels(s: int) -> _Floats:
    """The levels ``0, 2^-s, ..., 1/2, 1``.

    Args:
        s: exponent of the smallest non-zero level, 0 to 1000 (0 is ternary).

    Returns:
        float64[s + 2], ascending, without unit.

    Raises:
        TypeError, ValueError: ``s`` is not an integer in that range.

    Source: NUQSGD (JMLR 2021); exponential dithering in Global-QSGD (2023).
    """
    return np.concatenate(([0.0], np.ldexp(1.0, np.arange(-exponent(s), 1))))


def rounding_variance(r: npt.ArrayLike, levels: npt.ArrayLike) -> _Floats:
    """Exact variance of rounding each ``r`` at random to one of its two neighbouring levels, without bias.

    With ``r`` between ``low`` and ``high`` it is ``(high - r) (r - low)``.

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
    grid = _flat("levels", levels)
    if grid.size < 2 or grid[0] != 0 or grid[-1] != 1 or (np.diff(grid) <= 0).any():
        raise ValueError(f"levels={levels!r} must ascend from 0 to 1")
    if not ((ratios >= 0) & (ratios <= 1)).all():
        raise ValueError("r has elements outside [0, 1]; divide the magnitudes by a norm that bounds them")
    above = np.clip(np.searchsorted(grid, ratios, side="right"), 1, grid.size - 1)
    return np.asarray((grid[above] - ratios) * (ratios - grid[above - 1]))


def uniform_rounding_variance(v: npt.ArrayLike, norm: float, s: int) -> float:
    """Exact ``E||Q(v) - v||^2`` for ``Q(v_j) = norm sign(v_j) xi(|v_j| / norm)`` and uniform levels.

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
    return _scaled_variance(v, norm, uniform_levels(s))


def exponential_rounding_variance(v: npt.ArrayLike, norm: float, s: int) -> float:
    """Exact ``E||Q(v) - v||^2`` as ``uniform_rounding_variance``, for exponential levels.

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
    return _scaled_variance(v, norm, exponential_levels(s))


def joint_rounding_variance(fractions: npt.ArrayLike, steps: npt.ArrayLike = 1.0) -> _Floats:
    """Exact variance of ``sum_i steps_i floor(fractions_i + u_i)`` where the workers draw the u_i jointly.

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

    Source: `horovod_quant.kernels.keys.KeyChain.joint`; derived in this docstring.
    """
    f = _stacked("fractions", fractions)
    widths = np.broadcast_to(np.asarray(steps, np.float64), f.shape)
    dithers = [joint_dither(rank, len(f)) for rank in range(len(f))]
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


def joint_dither(rank: int, size: int) -> tuple[int, float]:
    """c and a of worker ``rank`` of ``size``, which draws ``frac(c U + a)`` from the uniform U that all workers share.

    Source: `horovod_quant.kernels.keys.KeyChain.joint`.
    """
    key = KeyChain(0, "").joint("", 0, rank, size)
    sign = -1 if key.flip else 1
    return sign << key.shift, sign * key.addend / (ALL_ONES + 1)


def _covariance(c: int, s: _Floats | float, d: int, t: _Floats | float) -> _Floats | float:
    """Of ``frac(c U + s)`` and ``frac(d U + t)``, see `joint_rounding_variance`."""
    if abs(c) > abs(d):
        c, s, d, t = d, t, c, s
    sign = 1 if c * d > 0 else -1
    ratio = abs(d // c)
    x = np.mod(ratio * s - sign * t, 1.0)
    return sign * (1 / 12 - x * (1 - x) / 2) / ratio


# ---- QSGD and NUQSGD


def qsgd_variance_factor(bucket: int, s: int) -> float:
    """QSGD's bound on ``E||Q(v) - v||^2 / ||v||_2^2``: ``min(B/s^2, sqrt(B)/s)``. For the 2-norm only.

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
    """The dense half of QSGD's bound with its constant: ``B / (4 s^2)``, by ``x (1 - x) <= 1/4``.

    Unlike the whole lemma it bounds ``E||Q(v) - v||^2 / norm^2`` for any norm that bounds the elements, so it
    holds for QSGDinf with ``norm = ||v||_inf``. Equality is reached if every element is midway between two levels.

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
    """A bound on NUQSGD's ``E||Q(v) - v||^2 / ||v||_2^2``: ``1/8 + 2 k^2 / 9``, or ``k - 1`` where ``k = 2^-s sqrt(B)``
    is 9/4 or more. For the 2-norm only.

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

    Source: derived in this docstring; `nuqsgd_paper_variance_factor` is the paper's, which is larger.
    """
    k = _times_the_smallest_level(bucket, s)
    return k - 1 if k >= 9 / 4 else 1 / 8 + 2 * k**2 / 9


def nuqsgd_paper_variance_factor(bucket: int, s: int) -> float:
    """The paper's bound: ``1/8 + k^2 / 4``, or ``k - 7/8`` where ``k = 2^-s sqrt(B)`` is 2 or more.

    As in `nuqsgd_variance_factor`, with ``1/8`` in place of ``(1 - x)/8``.

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
    """``2^-s sqrt(B)``."""
    return math.ldexp(math.sqrt(positive_int("bucket", bucket)), -exponent(s))


# ---- Global-QSGD


class ErrorBounds(NamedTuple):
    """Two bounds on the same variance, in the square of the gradient's unit; the smaller is the tighter."""

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


def global_qsgd_error(gradients: npt.ArrayLike, s: int, norm: str, rounding: str = "joint") -> float:
    """Exact ``E||estimate - average||^2`` of Global-QSGD with uniform levels.

    Args:
        gradients: one bucket of every worker, [n, B], finite.
        s: number of non-zero levels.
        norm: ``"max"`` or ``"l2"``.
        rounding: ``"joint"``, or the paper's ``"independent"``.

    Returns:
        Variance summed over the bucket, in the square of the unit of the gradients.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Source: Global-QSGD (2023), standard dithering; `joint_rounding_variance`.
    """
    matrix, s = _workers(gradients), positive_int("s", s)
    scale = global_scale(matrix, norm)
    if not _is_joint(rounding):
        return uniform_rounding_variance(matrix.ravel(), scale, s) / len(matrix) ** 2
    if not scale:
        return 0.0
    step = scale / s
    return step**2 * float(joint_rounding_variance(np.mod(matrix / step, 1.0)).sum()) / len(matrix) ** 2


def global_qsgd_error_bounds(
    gradients: npt.ArrayLike, s: int, norm: str, rounding: str = "joint"
) -> ErrorBounds:
    """The two bounds on ``global_qsgd_error``.

    For independent rounding ``dense`` is ``B N^2 / (4 n s^2)``, from ``x (1 - x) <= 1/4``; ``sparse`` is
    ``N / (s n^2) sum_i ||g_i||_1``, from ``x (1 - x) <= x``. Both hold for either scale ``N``.

    Joint rounding is better on average, but not for every vector: the errors of pairs whose differences equal those of
    their random numbers add up. The sums of the n // 2 pairs (or pairs and a triple) have a variance of at most 1/4
    each (a triple: 1), and no more than with independent rounding (a triple: three times as much); at worst their
    deviations add up. So the bounds are ``dense * m^2 / (4 n)`` with m = n, or n + 1 for odd n, and ``sparse`` times
    n // 2, or three times as much for odd n. For one worker they are the same.

    Args:
        gradients: one bucket of every worker, [n, B], finite.
        s: number of non-zero levels.
        norm: ``"max"`` or ``"l2"``.
        rounding: ``"joint"``, or the paper's ``"independent"``.

    Returns:
        Both bounds, in the square of the unit of the gradients.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Source: Global-QSGD (2023), standard dithering; for joint rounding derived in this docstring.
    """
    matrix, s = _workers(gradients), positive_int("s", s)
    n, bucket = matrix.shape
    scale = global_scale(matrix, norm)
    dense = bucket * scale**2 / (4 * n * s**2)
    sparse = scale * float(np.abs(matrix).sum()) / (s * n**2)
    if not _is_joint(rounding) or n == 1:
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

OVERFLOWS = 5e-7
"""How often, by design, a sum in a bucket of a rotated sum leaves its field, if the bucket's ratio of ``||sum||^2`` to
``sum ||g_i||^2`` equals its neighbours'. With independent gradients it differs by 3 to 4%, which makes that 1.2 to 1.4
times as frequent.
"""

SAMPLES = 128
"""Number of the sum's coordinates from which its norm is estimated, if a gradient has as many."""

LEAST_SHARE = 0.5
"""The smallest ``||sum||^2 / sum ||g_i||^2`` that steps allow for; gradients that cancel have less."""

_COORDINATES = 1024  # of a bucket


def rotated_sum_step(bits: int, workers: int, rounding: str = "joint") -> float:
    """The step of a rotated sum, in standard deviations of the sum's coordinates.

    It is the smallest step for which a bucket's coordinates leave a field of ``-2^(b-1) .. 2^(b-1) - 1`` steps at most
    once in `OVERFLOWS`. A coordinate T of the sum, in steps, is normally distributed, because of the signs of the
    second round. The rounding errors are those of pairs of workers: ``1 - x`` with probability x, otherwise ``-x``, for
    a fraction x of the pair's sum. c is the logarithm of the mean of ``exp(s error)`` over a pair's x and the errors.
    By Chernoff's bound
    ``log P(T + errors >= 2^(b-1)) <= min over s of s^2 / (2 step^2) + c(s) n / 2 - 2^(b-1) s``, which is set to its
    value for a lone normal variable that leaves the field equally rarely, ``-z^2 / 2``.

    The errors have a variance of n / 12, or less where the step is large compared with a worker's own coordinates,
    because an integer is then mostly 0: that is why a step exists for any number of workers. The derivation assumes
    that workers share the energy equally, pairs are alike, and the sum has the smallest share; then integers vary most.

    Args:
        bits: width of a field, 2 to 8.
        workers: number of workers ``n``.
        rounding: ``"joint"``, or ``"independent"``, where each worker's fraction replaces that of a pair.

    Returns:
        A ratio, without unit.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Source: derived in this docstring. It assumes that the pairs' errors are independent, as they are if the gradients
    are: pairs of workers share one random number, so gradients that are multiples of one vector can correlate them.
    """
    bits, workers = positive_int("bits", bits), positive_int("workers", workers)
    if not 2 <= bits <= 8:
        raise ValueError(f"bits={bits!r}: use 2 to 8")
    return _rotated_sum_step(bits, workers, _is_joint(rounding))


@functools.lru_cache(maxsize=256)
def _rotated_sum_step(bits: int, workers: int, joint: bool) -> float:
    room, exponent = float(1 << (bits - 1)), _tail_exponent()
    terms, deviation = _rounded_sums(workers, joint, alike=True)
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
    # The same everywhere, whatever the last bits of a library's exponential are.
    return math.ceil(high * 2**12) / 2**12


def estimate_margin(samples: int) -> float:
    """Factor applied to a sum's variance because it is only estimated.

    With a variance estimated from N coordinates, and a margin m, the deviations that fit a field are ``z^2 m X / N``
    instead of ``z^2``, where X has the chi-square distribution. The mean of ``exp(-z^2 m X / (2 N))`` is
    ``(1 + z^2 m / N)^(-N/2)``; m makes it ``exp(-z^2 / 2)``.

    Args:
        samples: N, at least 1.

    Returns:
        A ratio of variances, without unit; 1.17 for 128 samples.

    Raises:
        TypeError, ValueError: ``samples`` is not a positive integer.

    Source: derived in this docstring.
    """
    samples = positive_int("samples", samples)
    twice = 2 * _tail_exponent()
    if twice / samples > 700:
        return math.inf
    # Fewer bits than a library's exponential may differ in.
    return round(samples * math.expm1(twice / samples) / twice * 2**20) / 2**20


def rotated_sum_error(bits: int, workers: int, rounding: str = "joint") -> float:
    """``E||estimate - average||^2 / ||average||^2`` of a rotated sum, for independent gradients of equal norms.

    The variance of the rounding times the square of the step. It does not include exchanging overflows again.

    Args:
        bits: width of a field, 2 to 8.
        workers: number of workers.
        rounding: ``"joint"`` or ``"independent"``.

    Returns:
        A ratio of variances, without unit.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Source: `rotated_sum_step`; for joint rounding `joint_rounding_variance`, averaged over the fractions.
    """
    step = rotated_sum_step(bits, workers, rounding) * math.sqrt(min(estimate_margin(SAMPLES), workers))
    terms, deviation = _rounded_sums(workers, _is_joint(rounding), alike=False)
    return step**2 * terms * _fraction_variance(deviation / math.sqrt(workers) / step)


def rotated_sum_bias(error: float, exchanged_again: float) -> float:
    """Bound on ``||E estimate - average||^2`` of a rotated sum, in the unit of ``error``.

    The rounding is unbiased. Exchanging a bucket again, exactly, removes the mean of what the errors would have been
    there, ``E error 1[again]``, and by Cauchy-Schwarz ``||E error 1[again]||^2 <= P(again) E||error||^2``.

    Args:
        error: ``E||estimate - average||^2`` of a bucket if it is not exchanged again and wrapping is undone.
        exchanged_again: how often it is exchanged again, 0 to 1.

    Returns:
        A squared norm, in the unit of ``error``.

    Raises:
        ValueError: an argument is out of range.

    Source: derived in this docstring.
    """
    if not 0 <= exchanged_again <= 1 or error < 0:
        raise ValueError(f"error={error!r}, exchanged_again={exchanged_again!r}: no error and probability")
    return exchanged_again * error


def _tail_exponent() -> float:
    """``z^2 / 2`` where a bucket of normal coordinates exceeds z standard deviations once in `OVERFLOWS`."""
    return NormalDist().inv_cdf(OVERFLOWS / (2 * _COORDINATES)) ** 2 / 2


def _rounded_sums(workers: int, joint: bool, alike: bool) -> tuple[float, float]:
    """How many variables' fractions decide on the error of the workers' sum, and their deviation by a worker's.

    Args:
        alike: whether the two of a pair are the same, or independent.
    """
    if not joint or workers == 1:
        return workers, 1.0
    return workers / 2, 2.0 if alike else math.sqrt(2)


def _fraction_variance(deviation: float) -> float:
    """The mean of ``x (1 - x)``, x the fraction of a normal variable: 1/6 where it is wide, by its Fourier series."""
    if deviation < 0.2:
        return deviation * math.sqrt(2 / math.pi) - deviation**2
    k = np.arange(1, 20)
    return float(1 / 6 - (np.exp(-2 * (math.pi * k * deviation) ** 2) / (math.pi * k) ** 2).sum())


# ---- EDEN


def eden_variance_factor(bits: int, with_trellis: bool = False) -> float:
    """EDEN's ``E||Q(v) - v||^2 / ||v||_2^2``, over the rotations: ``D / (1 - D)``, for every vector v.

    With z the rotated vector, q its levels and the scale ``||v||^2 / <z, q>`` the squared error is
    ``||v||^4 ||q||^2 / <z, q>^2 - ||v||^2``. The coordinates of z are nearly independent and normally
    distributed, and Lloyd-Max levels have ``E z q = E q^2 = 1 - D``, as do those of a trellis, which are the means of
    what they stand for, too. It is less accurate for vectors shorter than a bucket.

    Args:
        bits: width of a code, 1 to 4.
        with_trellis: whether the levels are those of `horovod_quant.kernels.trellis`. A bucket shorter than 1,024 then
            has more, up to what there is without a trellis.

    Returns:
        A ratio of variances, without unit.

    Raises:
        ValueError: ``bits`` is out of range.

    Source: EDEN (Vargaftik et al., ICML 2022), the error with optimal levels; for one bit DRIVE (Vargaftik et al.,
    NeurIPS 2021), with its ``pi / 2 - 1``.
    """
    distortions = trellis.DISTORTIONS if with_trellis else rotation.DISTORTIONS
    if bits not in distortions:
        raise ValueError(f"bits={bits!r}: use 1 to 4")
    return distortions[bits] / (1 - distortions[bits])


def eden_error(
    bits: int, server_bits: int | None = None, ratio: float = 1.0, with_trellis: bool = False
) -> float:
    """``E||estimate - average||^2 / ||average||^2`` of EDEN: ``a v_up``, or ``a v_up + v_down (1 + a v_up)``.

    v is `eden_variance_factor` and a the ratio. The workers' errors are independent, so ``a v_up`` of them remains; the
    server rounds its result, including these errors.

    Args:
        bits: bits of the workers' codes.
        server_bits: bits of the server's second rounding; None for an allgather, which has none.
        ratio: see `energy_ratio`; 1 for gradients that have nothing in common.
        with_trellis: of both codes.

    Returns:
        A ratio of variances, without unit.

    Raises:
        ValueError: an argument is out of range.

    Source: EDEN (ICML 2022) for the first part; derived in this docstring.
    """
    if not ratio > 0:
        raise ValueError(f"ratio={ratio!r} must be positive")
    workers = ratio * eden_variance_factor(bits, with_trellis)
    if server_bits is None:
        return workers
    return workers + eden_variance_factor(server_bits, with_trellis) * (1 + workers)


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
    """Variance ``1 - u^2`` of the bit ``+1`` with probability ``(1 + u)/2``, else ``-1``.

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
    """Variance of the average ``qbar`` of the workers' bits: ``(1/n^2) sum_i (1 - u_i^2)``.

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
    """Variance that the server's second binarization adds: ``E (q_server - qbar)^2 = 1 - E qbar^2``.

    With ``one_bit_average_variance`` it adds up to ``1 - ubar^2``, the variance of the bit that is sent back,
    where ``ubar`` is the mean of ``u`` over the workers.

    Args:
        u: ``m / b`` of each worker, [n, ...], each in [-1, 1].

    Returns:
        float64 array of the shape after the first axis, without unit.

    Raises:
        ValueError: ``u`` has no workers, or an element is outside [-1, 1].

    Source: BinSGDM, the server's binarization. The sum does not depend on how the workers' bits depend on each other:
    the bit that is sent back is +1 or -1 with mean ``ubar`` in any case, so joint draws would gain nothing.
    """
    ratios = _unit("u", _stacked("u", u))
    return np.asarray(1 - ratios.mean(axis=0) ** 2 - one_bit_average_variance(ratios))


# ---- arguments


def _flat(name: str, value: npt.ArrayLike) -> _Floats:
    array = np.asarray(value, np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; it must be flat")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has elements that are not finite")
    return array


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


def _is_joint(rounding: str) -> bool:
    if rounding not in ("joint", "independent"):
        raise ValueError(f"rounding={rounding!r} is unknown; use 'joint' or 'independent'")
    return rounding == "joint"


def _scaled_variance(v: npt.ArrayLike, norm: float, levels: _Floats) -> float:
    magnitudes = np.abs(_flat("v", v))
    norm = float(norm)
    largest = float(magnitudes.max(initial=0.0))
    if not (math.isfinite(norm) and norm >= largest):
        raise ValueError(f"norm={norm} must be finite and at least the largest magnitude of v, {largest}")
    if norm == 0:
        return 0.0
    return norm**2 * float(rounding_variance(magnitudes / norm, levels).sum())
