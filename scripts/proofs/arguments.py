"""Validation of arguments that several proofs have."""

from __future__ import annotations

from operator import index

import numpy as np
import numpy.typing as npt


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


def flat(name: str, value: npt.ArrayLike) -> npt.NDArray[np.float64]:
    array = np.asarray(value, np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; it must be flat")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has elements that are not finite")
    return array
