"""Offsets of payloads' parts and keys of segments, as arrays."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from horovod_quant.kernels.keys import correlated_keys_of, keys_of
from horovod_quant.kernels.layout import ROW, buckets, code_words, tiles
from horovod_quant.kernels.rotation import rotated_elements
from horovod_quant.kernels.segments import Batch, Rounder


def keys_of_batch(batch: Batch, rounder: Rounder) -> np.ndarray:
    """Return the keys of a batch's segments, uint32 ``[segments, fields of Key]``."""
    if rounder.size:
        return correlated_keys_of(batch.chains, rounder.domain, batch.steps, rounder.rank, rounder.size)
    return keys_of(batch.chains, rounder.domain, batch.steps, rounder.rank)


# The segments of every step have the same lengths.


@lru_cache(maxsize=256)
def code_offsets(
    at: tuple[int, ...], elements: tuple[int, ...], bucket_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets of each segment's norms and codes."""
    first = np.array(at[: len(elements)], np.int64)
    return first, first + np.array([buckets(count, bucket_size) for count in elements], np.int64)


@lru_cache(maxsize=256)
def rotated_offsets(
    at: tuple[int, ...], elements: tuple[int, ...], bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return flags of non-empty segments, and offsets of codes and scales.

    Non-empty segments have a step.
    """
    first = np.array(at[: len(elements)], np.int64)
    filled = np.array(elements, np.int64) > 0
    lengths = np.array([code_words(rotated_elements(count), bits) for count in elements], np.int64)
    return filled, first + filled, first + filled + lengths


@lru_cache(maxsize=256)
def flag_offsets(at: tuple[int, ...], elements: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the offsets of each segment's bits.

    Also returns the word's index and the bit of each tile's flag.
    """
    first = np.array(at[: len(elements)], np.int64)
    counts = np.array([tiles(count) for count in elements], np.int64)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    words = np.repeat(first + ROW * counts, counts) + number // ROW
    bits = np.left_shift(np.uint32(1), (number % ROW).astype(np.uint32)).view(np.int32)
    return first, words, bits
