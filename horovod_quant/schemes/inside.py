"""How gradients travel to the workers of a node that average them: as float32, as float16, or as codes of 8 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal, get_args

import numpy as np

from horovod_quant.analysis.bounds import uniform_levels
from horovod_quant.analysis.rounding import gaussian_error
from horovod_quant.kernels.arrays import Part, no_part
from horovod_quant.kernels.layout import buckets, code_words
from horovod_quant.schemes.base import JOINT, Extent, Gradient, Workers, split_points

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


def sent_type(inside: Inside) -> str:
    """Of the array that travels."""
    return "int32" if inside == 8 else str(inside)


def error_inside(inside: Inside, workers: int) -> float:
    """That it adds to the average of so many workers, see `Scheme.relative_error`."""
    if inside == 8:
        levels = uniform_levels((1 << (_BITS - 1)) - 1)
        return gaussian_error(levels, "max", _BUCKET_SIZE, JOINT, workers, False)
    return HALF_ERROR if inside == FLOAT16 else 0.0


def length_to_send(inside: Inside, elements: int) -> int:
    """Of the array for some elements of one gradient."""
    return buckets(elements, _BUCKET_SIZE) + code_words(elements, _BITS) if inside == 8 else elements


def parts_to_send(
    inside: Inside, gradient: Gradient, own: Extent, workers: Workers, kernels: Any
) -> list[Part]:
    """What travels of some elements of a gradient."""
    values = gradient.values[own.start : own.stop]
    if inside == FLOAT32:
        return [(own.elements, np.float32, partial(kernels.to_float32, values))]
    if inside == FLOAT16:
        return [(own.elements, np.float16, partial(kernels.to_float16, values))]
    norms: list[Any] = []

    def fill_norms(out: Any) -> Any:
        norms.append(kernels.bucket_maxima(values, _BUCKET_SIZE, out))
        return norms[-1]

    def fill_words(out: Any) -> Any:
        # Jointly inside the node, with bits that no other node and no later rounding draws.
        stage, place = f"inside {workers.node}", workers.local_rank
        key = gradient.keys.joint(stage, gradient.step, place, workers.local_size)
        return kernels.encode_uniform_codes(values, norms.pop(), _BUCKET_SIZE, _BITS, key, own.start, out)

    return [
        (buckets(own.elements, _BUCKET_SIZE), np.float32, fill_norms),
        (code_words(own.elements, _BITS), np.int32, fill_words),
    ]


def mean_of_sent(inside: Inside, pieces: Sequence[Any], elements: Sequence[int], kernels: Any) -> Any:
    """The mean, float32, of what the workers of a node have sent of some gradients with so many elements."""
    if inside == FLOAT32:
        return kernels.mean(pieces)
    if inside == FLOAT16:
        return kernels.mean([_as_float32(piece, kernels) for piece in pieces])
    at = split_points([length_to_send(inside, count) for count in elements])

    def decode(i: int, out: Any) -> Any:
        out = kernels.target(elements[i]) if out is None else out
        end = at[i] + buckets(elements[i], _BUCKET_SIZE)
        norms = [kernels.view(piece[at[i] : end], np.float32) for piece in pieces]
        words = [piece[end : at[i + 1]] for piece in pieces]
        return kernels.decode_uniform_codes(words, norms, _BUCKET_SIZE, _BITS, 1.0 / len(pieces), out)

    parts: list[Part] = [(count, np.float32, partial(decode, i)) for i, count in enumerate(elements)]
    return kernels.assemble([*parts, no_part(np.float32)])


def _as_float32(piece: Any, kernels: Any) -> Any:
    return kernels.assemble([(piece.shape[0], np.float32, partial(kernels.to_float32, piece))])
