"""Validation of arguments that several functions of this package have."""

from __future__ import annotations

from operator import index

from horovod_quant.kernels import notices


def positive_int(name: str, value: int) -> int:
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be an integer, 1 or larger") from None
    if number < 1:
        raise ValueError(f"{name}={number} must be 1 or larger")
    return number


def exponent(s: int) -> int:
    try:
        number = index(s)
    except TypeError:
        raise TypeError(f"s={s!r} must be an integer from 0 to 1000") from None
    if not 0 <= number <= 1000:
        raise ValueError(f"s={number} must be from 0 to 1000, so that 2^-s is a normal float64")
    return number


def is_correlated(rounding: str) -> bool:
    """True for correlated rounding; its former word, "joint", comes with a DeprecationWarning."""
    if rounding == "joint":
        notices.deprecated("rounding='joint' is now rounding='correlated'")
        return True
    if rounding not in ("correlated", "independent"):
        raise ValueError(f"rounding={rounding!r}: use one of 'correlated', 'independent'")
    return rounding == "correlated"
