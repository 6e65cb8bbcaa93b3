"""Bits that the papers' schemes need with Elias codes.

Expected lengths, and bounds on them. Bounds hold for every vector. ``s`` is the number of non-zero levels of a uniform
set, and the exponent of the smallest non-zero level of an exponential one, as in `proofs.bounds`.
"""

from __future__ import annotations

import math
from typing import Callable

from proofs.arguments import exponent, positive_int
from proofs.bounds import nuqsgd_variance_factor

# Elias(k) <= factor * log2(k) + 1 bits. QSGD's lengths take 1 (the limit for large k of the omega code, up to
# their o(1)); the others are the smallest that hold for every k >= 1: omega is worst at k = 4 and k = 16.
_LOG_FACTORS = {None: 1.0, "gamma": 2.0, "omega": 2.5}


# ---- QSGD


def qsgd_nonzeros_bound(dimension: int, s: int) -> float:
    """Bound on the expected number of non-zero elements of ``Q(v)``.

    With the 2-norm it is ``min(d, s (s + sqrt(d)))``.

    Args:
        dimension: number of elements ``d``.
        s: number of non-zero uniform levels.

    Returns:
        A number of elements.

    Raises:
        TypeError, ValueError: an argument is not a positive integer.

    Source: QSGD, Lemma 3.1 (sparsity).
    """
    d, s = positive_int("dimension", dimension), positive_int("s", s)
    return min(float(d), s * (s + math.sqrt(d)))


def qsgd_sparse_length(dimension: int, s: int, code: str | None = None) -> float:
    """Expected bits of one bucket in the sparse layout, with its 2-norm.

    ``code=None`` is the paper's ``(3 + 3/2 log2(2 (s^2 + d) / (s (s + sqrt(d))))) s (s + sqrt(d)) + 32``. The
    paper has ``3/2 + o(1)``; without the o(1) it is not a bound for the gamma code: equal magnitudes at
    ``s = 1`` exceed it from about ``d = 2^18``. At ``s = sqrt(d)`` it is a loose ``9 d + 32``.

    ``code="gamma"`` and ``"omega"`` are proved for that code and every vector. With
    ``Elias(k) <= c log2 k + 1``, ``K`` non-zeros and ``Z`` the sum of their squared levels, concavity gives
    at most ``3 K + 1 + c (K+1) log2((d+1)/(K+1)) + (c/2) K log2(Z/K)`` bits. It is concave, so ``K``
    and ``Z`` may be their expectations. ``x log2(a/x)`` grows up to ``x = a/e``; beyond, its maximum counts.

    Args:
        dimension: number of elements ``d``.
        s: number of non-zero uniform levels.
        code: ``None`` for the paper's figure, ``"gamma"`` or ``"omega"`` for a proved bound.

    Returns:
        Bits, including 32 for the norm; the layout bit and the padding of ``kernels.entropy`` are not included.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Source: QSGD, Theorem 3.2.
    """
    d, s = positive_int("dimension", dimension), positive_int("s", s)
    factor = _log_factor(code)
    if code is None:
        nonzeros = s * (s + math.sqrt(d))
        return (3 + 1.5 * math.log2(2 * (s**2 + d) / nonzeros)) * nonzeros + 32
    nonzeros = qsgd_nonzeros_bound(d, s)
    gaps = factor * _largest_entropy(nonzeros + 1, d + 1)
    magnitudes = factor / 2 * _largest_entropy(nonzeros, _squared_levels(d, s))
    return 3 * nonzeros + 1 + gaps + magnitudes + 32


def qsgd_dense_length(dimension: int, s: int, code: str | None = None) -> float:
    """Expected bits of one bucket in the dense layout, with its 2-norm.

    The layout is the paper's Code'. ``(c/2 (log2(1 + (s^2 + min(d, s sqrt(d))) / d) + 1) + 2) d + 32``, where
    ``Elias(k) <= c log2 k + 1``.

    ``code=None`` is the paper's figure, ``c = 1`` without its o(1); it is not a bound for every vector: no
    Elias code sends 2 in fewer than 3 bits, so at ``s = sqrt(d)`` equal magnitudes need 4 bits per
    element where the figure is 3.29. ``code="gamma"`` (c = 2) and ``"omega"`` (c = 5/2) hold for every vector.

    Args:
        dimension: number of elements ``d``.
        s: number of non-zero uniform levels.
        code: ``None`` for the paper's figure, ``"gamma"`` or ``"omega"`` for a proved bound.

    Returns:
        Bits, including 32 for the norm; the layout bit and the padding of ``kernels.entropy`` are not included.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Source: QSGD, appendix, the length of Code', from which the paper takes its figure for ``s = sqrt(d)``.
    """
    d, s = positive_int("dimension", dimension), positive_int("s", s)
    per_element = _log_factor(code) / 2 * (math.log2(1 + _squared_levels(d, s) / d) + 1) + 2
    return per_element * d + 32


def qsgd_headline_length(dimension: int) -> float:
    """The paper's ``2.8 d + 32`` expected bits at ``s = sqrt(d)``.

    It is not a bound. It equals ``(log2(3)/2 + 2) d + 32``: ``qsgd_dense_length`` at ``s = sqrt(d)``, which is 3.29,
    without the bit added inside its bracket (half a bit per element). Equal magnitudes need 3 bits per element in the
    shorter layout of ``kernels.entropy``, and 4 in Code'. Gaussian vectors need about 2.73 (gamma) or 2.76 (omega) in
    the shorter layout, which is the sparse one, and 2.93 or 2.94 in Code'.

    Args:
        dimension: number of elements ``d``.

    Returns:
        Bits, including 32 for the norm.

    Raises:
        TypeError, ValueError: ``dimension`` is not a positive integer.

    Source: QSGD, section 3.1, the dense case ``s = sqrt(d)``.
    """
    return 2.8 * positive_int("dimension", dimension) + 32


# ---- NUQSGD


def nuqsgd_nonzeros_bound(dimension: int, s: int) -> float:
    """Expected number of non-zero elements of ``Q(v)`` with the 2-norm, at most.

    Let ``||v|| = 1``, and x be the sum of the squares of the elements r below ``2^-s``, which are not zero with
    probability ``2^s r``: of these ``2^s sqrt(d x)`` at most. The others are ``4^s (1 - x)`` at most. Together that is
    ``4^s + d/4`` (at ``sqrt(x) = 2^-s sqrt(d) / 2``) or, where that x is above 1, ``2^s sqrt(d)``; and never more than
    d.

    Args:
        dimension: number of elements ``d``.
        s: exponent of the smallest non-zero level.

    Returns:
        A number of elements.

    Raises:
        TypeError, ValueError: an argument is not an integer in range.

    Source: derived in this docstring. NUQSGD (JMLR 2021) has ``4^s + 2^s sqrt(d)``.
    """
    d, s = positive_int("dimension", dimension), exponent(s)
    if d >= 1 << (2 * s + 2):
        return math.ldexp(math.sqrt(d), s)
    return float(d) if d <= 1 << 2 * s else min(float(d), 4.0**s + d / 4)


def nuqsgd_sparse_length(dimension: int, s: int, code: str | None = None) -> float:
    """Expected bits of one bucket in the sparse layout, with its 2-norm.

    ``code=None`` is the paper's ``3 n + n log2(d/n) + n log2 log2(8 (4^s + d) / n) + 32`` with
    ``n = 4^s + 2^s sqrt(d)``, without its o(1).

    ``code="gamma"`` and ``"omega"`` are proved for that code and every vector, as in `qsgd_sparse_length`. A level
    ``2^-s y`` has the index ``1 + log2 y``. With K non-zeros, and Z the sum of their ``y^2``, there are at most
    ``3 K + 1 + c (K+1) log2((d+1)/(K+1)) + c K log2(1 + log2(Z/K) / 2)`` bits, as ``log2(1 + log2(z)/2)`` is concave.
    So is the whole, and K and Z may be their expectations: at most `nuqsgd_nonzeros_bound`, and ``4^s`` times 1 more
    than `bounds.nuqsgd_variance_factor`. Of the K up to there the worst one counts.

    Args:
        dimension: number of elements ``d``.
        s: exponent of the smallest non-zero level.
        code: ``None`` for the paper's figure, ``"gamma"`` or ``"omega"`` for a proved bound.

    Returns:
        Bits, including 32 for the norm; the layout bit and the padding of ``kernels.entropy`` are not included.

    Raises:
        TypeError, ValueError: an argument is not as above, or the paper's figure is requested for ``n`` above ``d/e``,
            where it does not apply.

    Source: NUQSGD (JMLR 2021), the theorem on code length; the proof for a given code is derived in this docstring.
    """
    d, s = positive_int("dimension", dimension), exponent(s)
    factor = _log_factor(code)
    if code is None:
        n = 4.0**s + math.ldexp(math.sqrt(d), s) if s <= 500 else math.inf
        if n > d / math.e:
            raise ValueError(
                f"dimension={d}, s={s}: the paper's figure needs 4^s + 2^s sqrt(d) <= d/e; use code='gamma' or 'omega'"
            )
        return n * (3 + math.log2(d / n) + math.log2(math.log2(8 * (4.0**s + d) / n))) + 32
    log_squares = 2 * s + math.log2(1 + nuqsgd_variance_factor(d, s))

    def bits(k: float) -> float:
        gaps = (k + 1) * math.log2((d + 1) / (k + 1))
        indices = k * math.log2(1 + max(0.0, log_squares - math.log2(k)) / 2)
        return 3 * k + 1 + factor * (gaps + indices)

    return _largest_of_concave(bits, nuqsgd_nonzeros_bound(d, s)) + 32


def _largest_of_concave(function: Callable[[float], float], end: float) -> float:
    """Return the maximum over ``0 < x <= end``, by thirds.

    It is not below the maximum by more than rounding.
    """
    low, high = end * 1e-9, end
    while high - low > 1e-9 * end:
        third = (high - low) / 3
        if function(low + third) < function(high - third):
            low += third
        else:
            high -= third
    return max(function(low), function(high), function(end))


def _squared_levels(d: int, s: int) -> float:
    # E sum of squared level indices: s^2 of the unit vector itself, and the variance by Lemma 3.1.
    return s**2 + min(float(d), s * math.sqrt(d))


def _largest_entropy(x: float, a: float) -> float:
    """The largest ``y log2(a/y)`` over ``0 < y <= x``."""
    y = min(x, a / math.e)
    return y * math.log2(a / y)


def _log_factor(code: str | None) -> float:
    if code not in _LOG_FACTORS:
        raise ValueError(f"code={code!r} is unknown; use 'gamma', 'omega', or None for the paper's figure")
    return _LOG_FACTORS[code]
