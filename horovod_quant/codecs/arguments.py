"""Validation of arguments that several functions of this package have."""

from __future__ import annotations

from horovod_quant.kernels import notices


def is_correlated(rounding: str) -> bool:
    """True for correlated rounding; its former word, "joint", comes with a DeprecationWarning."""
    if rounding == "joint":
        notices.deprecated("rounding='joint' is now rounding='correlated'")
        return True
    if rounding not in ("correlated", "independent"):
        raise ValueError(f"rounding={rounding!r}: use one of 'correlated', 'independent'")
    return rounding == "correlated"
