"""Intra-node codecs: float32, float16, or codes of 8 bits."""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import numpy as np

from horovod_quant.codecs.base import Codec
from horovod_quant.codecs.floats import Floats
from horovod_quant.codecs.norms_and_codes import NormsAndCodes
from horovod_quant.schemes.base import CORRELATED

Inside = Literal["float32", "float16", 8]
FLOAT32: Final = "float32"
FLOAT16: Final = "float16"

_BITS, _BUCKET_SIZE = 8, 256
"""Bits and bucket size of the codes: a sign and a level of the bucket's largest magnitude.

Buckets divide tiles, so a worker's part of a gradient begins where a bucket does.
"""

FLOAT16_NMSE = 2**-20 / 12 / (7 / 3)
"""Nmse of float16, which has 11 significant bits.

Errors are assumed uniform over a unit in the last place, and values uniform over an octave.
"""


def require_inside(value: Any) -> Inside:
    """Return the value as a Python str or int.

    Raises:
        ValueError: it is not ``"float32"``, ``"float16"`` or ``8``.
    """
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, (bool, float)) or value not in get_args(Inside):
        raise ValueError(f"inside={value!r}: use 'float32', 'float16' or 8")
    return value


def intra_codec(inside: Inside) -> Codec:
    """Return the intra-node codec."""
    return NormsAndCodes("uniform", _BITS, "max", _BUCKET_SIZE) if inside == 8 else Floats(str(inside))


def nmse_inside(inside: Inside, workers: int) -> float:
    """Return the nmse added by averaging in a node, see `Scheme.expected_nmse`."""
    codec = intra_codec(inside)
    if isinstance(codec, NormsAndCodes):
        return codec.nmse(workers, CORRELATED)
    return FLOAT16_NMSE if inside == FLOAT16 else 0.0
