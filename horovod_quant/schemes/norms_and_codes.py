"""What QSGD and NUQSGD send of many parts of tensors at once, for kernels that have a `Table`: norms, and codes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from horovod_quant.kernels.layout import buckets, code_words
from horovod_quant.schemes.base import split_points


class Places(NamedTuple):
    """Where the parts have what they consist of.

    Attributes:
        norms: selects the norms of all parts, one after another.
        norm_at: where each part's norms begin among those.
        words: the place of each part's first word.
        length: of all parts.
    """

    norms: Any
    norm_at: np.ndarray
    words: np.ndarray
    length: int


@lru_cache(maxsize=256)
def norms_first(elements: tuple[int, ...], bucket_size: int, bits: int) -> Places:
    """All parts' norms, and then all their codes."""
    norm_at = np.array(split_points([buckets(count, bucket_size) for count in elements]), np.int64)
    word_at = norm_at[-1] + np.array(split_points([code_words(count, bits) for count in elements]), np.int64)
    return Places(slice(0, int(norm_at[-1])), norm_at[:-1], word_at[:-1], int(word_at[-1]))


@lru_cache(maxsize=256)
def part_by_part(elements: tuple[int, ...], bucket_size: int, bits: int) -> Places:
    """A part's norms, its codes, and then the next part's."""
    counts = np.array([buckets(count, bucket_size) for count in elements], np.int64)
    lengths = counts + np.array([code_words(count, bits) for count in elements], np.int64)
    at, norm_at = (np.array(split_points(each), np.int64) for each in (lengths.tolist(), counts.tolist()))
    norms = np.arange(norm_at[-1]) + np.repeat(at[:-1] - norm_at[:-1], counts)
    return Places(norms, norm_at[:-1], at[:-1] + counts, int(at[-1]))


def encode_each(
    scheme: Any,
    kernels: Any,
    values: Sequence[Any],
    keys: np.ndarray,
    starts: Sequence[int],
    places: Places,
) -> Any:
    """What is sent of parts with these values, of which each has a key and a place of its first element."""
    table = kernels.Table(values)

    def fill(out: Any) -> Any:
        norms = scheme.norms_each(kernels, table)
        out[places.norms] = norms.view(np.int32)
        return scheme.encode_each(kernels, table, norms, keys, starts, places.words, out)

    return kernels.assemble([(places.length, np.int32, fill)])


def add_each(
    scheme: Any, kernels: Any, pieces: Sequence[Any], places: Places, factor: float, outs: Sequence[Any]
) -> None:
    """Writes the sums, times a factor, of what `encode_each` gave all workers, by rank."""
    norms = [piece[places.norms].view(np.float32) for piece in pieces]
    scheme.decode_each(kernels, pieces, places.words, norms, places.norm_at, factor, outs)
