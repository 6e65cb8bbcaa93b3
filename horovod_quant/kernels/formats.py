"""Formats of payloads: codecs' parameters for the kernels of many segments.

The codecs of this package inherit them. `horovod_quant.kernels.segments` composes the payloads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from horovod_quant.kernels.checks import MAX_LEVELS, check_bucket_size, check_range
from horovod_quant.kernels.layout import buckets, split_points, sum_words


@dataclass(frozen=True)
class CodeFormat:
    """Norms and codes.

    Args:
        levels: ``"uniform"`` or ``"exponential"``.
        bits: width of a code.
        norm: ``"l2"`` or ``"max"``.
        bucket_size: number of elements that share a norm.
    """

    levels: str
    bits: int
    norm: str
    bucket_size: int

    @property
    def is_exponential(self) -> bool:
        return self.levels == "exponential"

    def check(self) -> None:
        """Raise ValueError if a parameter is out of range."""
        check_range("bits", self.bits, 2, 8 if self.is_exponential else 16)
        check_bucket_size(self.bucket_size)


@dataclass(frozen=True)
class RotatedFormat:
    """Step words, codes of rotated elements, and scales.

    Args:
        bits: width of a code.
        trellis: True if the codes are trellis-coded.
    """

    bits: int
    trellis: bool = False


@dataclass(frozen=True)
class SumFormat:
    """Signed digits in fields wide enough for their sum over all workers.

    Args:
        width: bits of a field.
        levels: largest digit of a worker.
        norm: ``"max"`` (the largest magnitude over all workers) or ``"l2"`` (the root of the sum of all squares).
        bucket_size: number of elements that share a norm.
    """

    width: int
    levels: int
    norm: str
    bucket_size: int

    def check(self) -> None:
        """Raise ValueError if a parameter is out of range."""
        check_range("levels", self.levels, 1, MAX_LEVELS)
        check_range("width", self.width, 1, 16)
        check_bucket_size(self.bucket_size)

    def offsets(self, elements: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the offsets of norms and words, with totals."""
        return norm_offsets(elements, self.bucket_size), _word_offsets(elements, self.width)


class Sums(NamedTuple):
    """Sums of all workers' digits, with their norms.

    Attributes:
        words: the words of all tensors.
        norms: the norms of all tensors.
        elements: the tensors' lengths.
        table: the table of the `Batch` whose values decoding may overwrite.
    """

    words: Any
    norms: Any
    elements: tuple[int, ...]
    table: Any = None


@lru_cache(maxsize=256)  # the tensors of every step have the same lengths
def norm_offsets(elements: tuple[int, ...], bucket_size: int) -> tuple[int, ...]:
    """Return the offset of each tensor's norms, and their total."""
    return tuple(split_points([buckets(count, bucket_size) for count in elements]))


@lru_cache(maxsize=256)
def _word_offsets(elements: tuple[int, ...], width: int) -> tuple[int, ...]:
    return tuple(split_points([sum_words(count, width) for count in elements]))
