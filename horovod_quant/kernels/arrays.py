"""Functions on whole numpy arrays for the numpy and native backends.

Schemes use these functions rather than numpy, so that backends on other frameworks' tensors can run them, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from horovod_quant.kernels.keys import ALL_ONES, Key, RngKey
from horovod_quant.kernels.layout import TILE, ceil_div, code_words, tiles

_ALIGNMENT = 64

_byte_of: Callable[[Any], Any] = ctypes.c_char.from_buffer

TILES_AT_A_TIME = 64
"""Tiles per iteration of a loop: a float32 sum stays in the cache, and needs no memory for a whole shard."""

Part = tuple[int, Any, Callable[[np.ndarray], Any]]
"""Length, dtype, and ``fill(out)``: it writes to ``out`` and returns it, or returns values to copy."""


def no_part(dtype: Any) -> Part:
    """Return an empty part, which sets an array's type."""
    return 0, dtype, lambda out: np.zeros(0, dtype)


def whole_tiles(elements: int, bits: int, encode: Callable[[Any], Any]) -> list[Part]:
    """Return the parts of codes padded with zeros to whole tiles."""
    used = code_words(elements, bits)
    unused = code_words(tiles(elements) * TILE, bits) - used
    return [(used, np.int32, encode), (unused, np.int32, lambda out: np.zeros(unused, np.int32))]


def address(array: np.ndarray) -> int:
    """Return the address of an array's first element."""
    try:
        return ctypes.addressof(_byte_of(array))  # 10× faster than numpy's attributes
    except (TypeError, ValueError):  # the array is read-only, empty or not contiguous
        return array.__array_interface__["data"][0]


def aligned_empty(elements: int, dtype: Any) -> np.ndarray:
    """Return an array aligned to 64 bytes.

    TensorFlow requires this alignment of memory that it does not copy.
    """
    return aligned(memory_for(elements, dtype), elements, dtype)


def memory_for(elements: int, dtype: Any) -> np.ndarray:
    """Return memory, uint8, with room for an aligned array."""
    return np.empty(elements * np.dtype(dtype).itemsize + _ALIGNMENT, np.uint8)


def aligned(memory: np.ndarray, elements: int, dtype: Any) -> np.ndarray:
    """Return the aligned array in memory of `memory_for`."""
    offset = -address(memory) % _ALIGNMENT
    return memory[offset : offset + elements * np.dtype(dtype).itemsize].view(dtype)


def pack(parts: Sequence[Part]) -> np.ndarray:
    """Return one array of consecutive parts, each computed in place.

    Int32 words if the types differ.
    """
    types = {np.dtype(dtype) for _, dtype, _ in parts}
    dtype = types.pop() if len(types) == 1 else np.dtype(np.int32)
    array = aligned_empty(sum(length for length, _, _ in parts), dtype)
    position = 0
    for length, part_dtype, fill in parts:
        out = array[position : position + length]
        if out.dtype != part_dtype:
            out = out.view(part_dtype)
        result = fill(out)
        if result is not out:
            out[...] = result
        position += length
    return array


def concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays)


def view(array: np.ndarray, dtype: Any) -> np.ndarray:
    """View an array as another type of the same size."""
    return array.view(dtype)


def empty(elements: int) -> np.ndarray:
    """Return the ``out`` of a decoding kernel for a temporary float32 result."""
    return np.empty(elements, np.float32)


def step_word(number: int, out: np.ndarray | None = None) -> np.ndarray:
    """Return an int32 array with the low 32 bits of a number.

    See `key_of_word`.
    """
    found = np.empty(1, np.int32) if out is None else out
    found[...] = np.array([number & ALL_ONES], np.uint32).view(np.int32)
    return found


def key_of_word(chain: RngKey, domain: str, word: np.ndarray, worker: int = 0) -> Key:
    """Return the key of a step that another worker sent.

    It is ``chain.key(domain, step, worker)``, with the step from a word. A word on a GPU or in a graph is not read
    before the kernels that use the key run there.
    """
    return chain.key(domain, int(word[0]) & ALL_ONES, worker)


def pack_flags(flags: np.ndarray) -> np.ndarray:
    """Pack flags as bits of int32 words, the first flag lowest."""
    words = np.zeros(4 * ceil_div(len(flags), 32), np.uint8)
    packed = np.packbits(flags, bitorder="little")
    words[: len(packed)] = packed
    return words.view(np.int32)


def unpack_flags(words: np.ndarray, count: int) -> np.ndarray:
    if len(words) != ceil_div(count, 32):
        raise ValueError(f"words: {len(words)} words cannot hold {count} flags")
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), count=count, bitorder="little").astype(
        bool
    )


def with_nan_tiles(values: np.ndarray, nonfinite: np.ndarray) -> np.ndarray:
    """Write NaN to the marked tiles of 1,024 elements, and return ``values``."""
    nan = 0x7FC0 if values.dtype == np.uint16 else np.nan  # uint16 has the bits of bfloat16
    for tile in np.flatnonzero(nonfinite):
        values[tile * TILE : (tile + 1) * TILE] = nan
    return values
