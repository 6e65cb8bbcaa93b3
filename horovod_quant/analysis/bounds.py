"""Step sizes and error bounds, by the functions that the schemes use.

The papers' bounds, and proofs that the package does not call, are in ``scripts/proofs`` of the repository.
"""

from typing import Any

from horovod_quant.codecs.levels import exponential_levels, uniform_levels
from horovod_quant.codecs.rotated_codes import eden_error, eden_variance_factor
from horovod_quant.codecs.rotated_sum_steps import estimate_margin, rotated_sum_error, rotated_sum_step
from horovod_quant.codecs.rounding_error import correlated_dither, gaussian_error, rounding_variance
from horovod_quant.kernels import notices

__all__ = [
    "correlated_dither",
    "eden_error",
    "eden_variance_factor",
    "estimate_margin",
    "exponential_levels",
    "gaussian_error",
    "rotated_sum_error",
    "rotated_sum_step",
    "rounding_variance",
    "uniform_levels",
]


def __getattr__(name: str) -> Any:
    if name == "joint_dither":
        notices.deprecated("joint_dither is now correlated_dither")
        return correlated_dither
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
