"""Sizes of packed arrays, the same for every backend.

Elements are processed in rows of 32 consecutive ones. Element ``32 r + g`` is row ``r``, lane ``g``; a word never mixes
lanes, so that packing is 32 independent columns of shifts and adds.

- A *sum* array has signed digits that an allreduce adds: ``32 // width`` whole fields per word.
- A *code* array has codes that are only moved: each lane is a dense stream of bits, and a code may straddle two words.
  32 rows (a tile of 1,024 elements) fill exactly ``bits`` words per lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

ROW = 32
TILE = ROW * 32

WHOLE_TENSOR = 2**40
"""Bucket size for one bucket per tensor, larger than any tensor."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def rows(elements: int) -> int:
    return ceil_div(elements, ROW)


def buckets(elements: int, bucket_size: int) -> int:
    return ceil_div(elements, bucket_size)


def filled_bucket_size(elements: int, bucket_size: int) -> int:
    """Return the bucket size for the layout.

    It is at most the number of elements, in whole rows.
    """
    return min(bucket_size, ROW * max(rows(elements), 1))


def tiles(elements: int) -> int:
    return ceil_div(elements, TILE)


def sum_words(elements: int, width: int) -> int:
    """Return the number of int32 words for signed digits of ``width`` bits."""
    return ROW * ceil_div(rows(elements), 32 // width)


def code_words(elements: int, bits: int) -> int:
    """Return the number of int32 words for codes of ``bits`` bits."""
    return ROW * ceil_div(rows(elements) * bits, 32)


def split_points(lengths: Sequence[int]) -> list[int]:
    """Return the offsets ``[0, l_0, l_0 + l_1, ...]`` of consecutive slices."""
    return [0, *np.cumsum(lengths, dtype=np.int64).tolist()]


def split(array: Any, lengths: Sequence[int]) -> list[Any]:
    """Return consecutive slices of these lengths."""
    at = split_points(lengths)
    return [array[start:stop] for start, stop in zip(at, at[1:])]
