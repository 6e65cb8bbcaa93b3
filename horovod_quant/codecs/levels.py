"""Level sets of stochastic rounding as functions of ``s``, for formulas.

Kernels have separate code. ``s`` is the number of non-zero levels of a uniform set ``0, 1/s, ..., 1``, and the exponent
of the smallest non-zero level of an exponential set ``0, 2^-s, ..., 1/2, 1``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from horovod_quant.codecs.arguments import exponent, positive_int


def uniform_levels(s: int) -> npt.NDArray[np.float64]:
    """Return the levels ``k/s``, ``k = 0..s``.

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


def exponential_levels(s: int) -> npt.NDArray[np.float64]:
    """Return the levels ``0, 2^-s, ..., 1/2, 1``.

    Args:
        s: exponent of the smallest non-zero level, 0 to 1000 (0 is ternary).

    Returns:
        float64[s + 2], ascending, without unit.

    Raises:
        TypeError, ValueError: ``s`` is not an integer in that range.

    Source: NUQSGD (JMLR 2021); exponential dithering in Global-QSGD (2023).
    """
    return np.concatenate(([0.0], np.ldexp(1.0, np.arange(-exponent(s), 1))))
