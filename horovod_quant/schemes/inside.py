"""How gradients travel to the workers of a node that average them: as float32, as float16, or as codes of 8 bits."""

from __future__ import annotations

import math
from typing import Any, Final, Literal, get_args

import numpy as np

from horovod_quant.codecs.base import Codec
from horovod_quant.codecs.floats import Floats
from horovod_quant.codecs.levels import uniform_levels
from horovod_quant.codecs.norms_and_codes import NormsAndCodes
from horovod_quant.codecs.rounding_error import gaussian_error
from horovod_quant.schemes.base import CORRELATED

Inside = Literal["float32", "float16", 8]
FLOAT32: Final = "float32"
FLOAT16: Final = "float16"

_BITS, _BUCKET_SIZE = 8, 256
"""Of the codes: a sign and a level of the bucket's largest magnitude. Buckets divide tiles, so a worker's part of a
gradient begins where a bucket does.
"""

HALF_ERROR = 2**-10 / math.sqrt(12) / math.sqrt(7 / 3)
"""Relative error of float16, which keeps 11 bits: if errors are spread evenly over a unit in the last place, and values
over an octave.
"""


def require_inside(value: Any) -> Inside:
    """The value as Python's own.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, (bool, float)) or value not in get_args(Inside):
        raise ValueError(f"inside={value!r}: use 'float32', 'float16' or 8")
    return value


def intra_codec(inside: Inside) -> Codec:
    """The codec of what travels."""
    return NormsAndCodes("uniform", _BITS, "max", _BUCKET_SIZE) if inside == 8 else Floats(str(inside))


def error_inside(inside: Inside, workers: int) -> float:
    """The root of the nmse that it adds to the average of so many workers, see `Scheme.expected_nmse`."""
    if inside == 8:
        levels = uniform_levels((1 << (_BITS - 1)) - 1)
        return gaussian_error(levels, "max", _BUCKET_SIZE, CORRELATED, workers, False)
    return HALF_ERROR if inside == FLOAT16 else 0.0
