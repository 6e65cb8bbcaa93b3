"""Offsets of payloads' parts, keys and starts of segments, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Callable

import numpy as np

from horovod_quant.kernels.checks import check_range
from horovod_quant.kernels.formats import CodeFormat
from horovod_quant.kernels.keys import keys_of
from horovod_quant.kernels.layout import ROW, TILE, code_words
from horovod_quant.kernels.rotation import rotated_words
from horovod_quant.kernels.segments import Batch, Rounder


def keys_of_batch(batch: Batch, rounder: Rounder) -> np.ndarray:
    """Return the keys of a batch's segments, uint32 ``[segments, fields of Key]``."""
    return keys_of(batch.chains, rounder.domain, batch.steps, rounder.rank, rounder.size)


def starts_of_batch(batch: Batch, count: int) -> np.ndarray:
    """Return the starts of a batch's segments, ``count`` in number."""
    if not len(batch.starts) == len(batch.chains) == len(batch.elements) == count:
        raise ValueError(
            f"{len(batch.starts)} starts, {len(batch.chains)} chains and {len(batch.elements)} lengths "
            f"of {count} gradients"
        )
    return np.array(batch.starts, np.int64)


def check_offsets(what: str, offsets: np.ndarray, lengths: np.ndarray, room: int) -> None:
    """Raise ValueError unless all gradients' words or norms are within the array."""
    if offsets.shape != lengths.shape or (offsets < 0).any() or (offsets + lengths > room).any():
        raise ValueError(
            f"offsets of {len(lengths)} gradients' {what}: not all within {room} words, but {offsets}"
        )


def code_offsets(
    codec: CodeFormat, at: Sequence[int], elements: tuple[int, ...], room: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets of each segment's norms and codes, within the array."""
    codec.check()
    norms_at, words_at = _code_offsets(tuple(at), elements, codec.bucket_size)
    lengths = words_at - norms_at + lengths_of(code_words, elements, codec.bits)
    check_offsets("payloads", norms_at, lengths, room)
    return norms_at, words_at


def rotated_offsets(
    bits: int, at: Sequence[int], elements: tuple[int, ...], room: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return flags of non-empty segments, and offsets of codes and scales.

    Non-empty segments have a step. All are within the array.
    """
    check_range("bits", bits, 1, 4)
    filled, words_at, scales_at = _rotated_offsets(tuple(at), elements, bits)
    check_offsets("words", words_at, scales_at - words_at, room)
    check_offsets("scales", scales_at, counts_of(elements, TILE), room)
    return filled, words_at, scales_at


# The segments of every step have the same lengths. Cached arrays are never modified.


@lru_cache(maxsize=1024)
def counts_of(elements: tuple[int, ...], unit: int) -> np.ndarray:
    """Return the number of units that each segment's elements fill."""
    return -(-np.array(elements, np.int64) // unit)


@lru_cache(maxsize=1024)
def lengths_of(function: Callable[[int, int], int], elements: tuple[int, ...], width: int) -> np.ndarray:
    """Return the values of a function of `layout` for all segments."""
    return np.array([function(count, width) for count in elements], np.int64)


@lru_cache(maxsize=256)
def _code_offsets(
    at: tuple[int, ...], elements: tuple[int, ...], bucket_size: int
) -> tuple[np.ndarray, np.ndarray]:
    first = np.array(at[: len(elements)], np.int64)
    return first, first + counts_of(elements, bucket_size)


@lru_cache(maxsize=256)
def _rotated_offsets(
    at: tuple[int, ...], elements: tuple[int, ...], bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    first = np.array(at[: len(elements)], np.int64)
    filled = np.array(elements, np.int64) > 0
    return filled, first + filled, first + filled + lengths_of(rotated_words, elements, bits)


@lru_cache(maxsize=256)
def flag_offsets(at: tuple[int, ...], elements: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the offsets of each segment's bits.

    Also returns the word's index and the bit of each tile's flag.
    """
    first = np.array(at[: len(elements)], np.int64)
    counts = counts_of(elements, TILE)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    words = np.repeat(first + ROW * counts, counts) + number // ROW
    bits = np.left_shift(np.uint32(1), (number % ROW).astype(np.uint32)).view(np.int32)
    return first, words, bits
