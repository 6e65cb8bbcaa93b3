"""Step sizes and errors of each scheme in one place: the functions that the schemes themselves use.

The papers' bounds, and proofs that the package does not call, are in ``scripts/proofs`` of the repository.
"""

from horovod_quant.codecs.levels import exponential_levels, uniform_levels
from horovod_quant.codecs.rotated_codes import eden_error, eden_variance_factor
from horovod_quant.codecs.rotated_sum_steps import estimate_margin, rotated_sum_error, rotated_sum_step
from horovod_quant.codecs.rounding_error import gaussian_error, joint_dither, rounding_variance

__all__ = [
    "eden_error",
    "eden_variance_factor",
    "estimate_margin",
    "exponential_levels",
    "gaussian_error",
    "joint_dither",
    "rotated_sum_error",
    "rotated_sum_step",
    "rounding_variance",
    "uniform_levels",
]
