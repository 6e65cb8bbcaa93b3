"""Codec of Global-QSGD's uniform levels: integers on a shared scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from horovod_quant.kernels.layout import buckets, sum_words
from horovod_quant.kernels.segments import Batch, Rounder, segment_kernels, split_points


@dataclass(frozen=True)
class SharedScaleSums:
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

    domain = "worker"

    def offsets(self, elements: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the offsets of norms and words, with totals."""
        return norm_offsets(elements, self.bucket_size), _word_offsets(elements, self.width)

    def encode(self, kernels: Any, batch: Batch, rounder: Rounder, norms: Any, norm_at: Sequence[int]) -> Any:
        """Return all tensors' digits, and a word counting active workers."""
        return segment_kernels(kernels).encode_sums(
            self.bucket_size, self.levels, self.width, batch, rounder, norms, norm_at
        )

    def decode(
        self,
        kernels: Any,
        words: Any,
        norms: Any,
        elements: tuple[int, ...],
        tensors: Sequence[int],
        factor: Any,
        outs: Sequence[Any],
        table: Any = None,
    ) -> Sequence[Any]:
        """Write the sums of some of the tensors times a factor."""
        norm_at, word_at = self.offsets(elements)
        return segment_kernels(kernels).decode_sums(
            self.bucket_size,
            self.levels,
            self.width,
            words,
            word_at,
            norms,
            norm_at,
            tensors,
            factor,
            outs,
            table,
        )


@lru_cache(maxsize=256)  # the tensors of every step have the same lengths
def norm_offsets(elements: tuple[int, ...], bucket_size: int) -> tuple[int, ...]:
    """Return the offset of each tensor's norms, and their total."""
    return tuple(split_points([buckets(count, bucket_size) for count in elements]))


@lru_cache(maxsize=256)
def _word_offsets(elements: tuple[int, ...], width: int) -> tuple[int, ...]:
    return tuple(split_points([sum_words(count, width) for count in elements]))
