"""Validation and conversion of arguments for the functions of `native`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from horovod_quant.kernels.arrays import address
from horovod_quant.kernels.buffer_view import BufferView
from horovod_quant.kernels.checks import check_bucket_size, check_range
from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import buckets, code_words, sum_words
from horovod_quant.kernels.native_library import POINTER

KEY = ctypes.c_uint32 * len(Key._fields)

FLOAT32 = 0
"""The library's number of this type."""

_TYPES = {
    np.dtype(np.float32): FLOAT32,
    np.dtype(np.float16): 1,
    np.dtype(np.float64): 2,
    np.dtype(np.uint16): 3,  # the bits of bfloat16
}

MAX_LEVELS = 2**15 - 1


def _is_plain(array: np.ndarray) -> bool:
    flags = array.flags
    return flags.c_contiguous and flags.aligned


def flat(array: np.ndarray, name: str) -> np.ndarray:
    """Return the array, or a copy if the library cannot read it."""
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; it must be flat")
    return array if _is_plain(array) else array.copy()


def validated(array: np.ndarray, dtype: type, name: str) -> np.ndarray:
    if array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {np.dtype(dtype)}")
    return flat(array, name)


def type_of(array: np.ndarray | BufferView, name: str) -> int:
    found = _TYPES.get(array.dtype)
    if found is None:
        raise TypeError(
            f"{name} has dtype {array.dtype}; it must be float32, float16, float64, or bfloat16 as uint16"
        )
    return found


class Out:
    """Result of a kernel: ``out``, or a temporary array copied to it."""

    def __init__(self, out: np.ndarray | None, length: int, dtype: type) -> None:
        self.out = out
        if out is None:
            self.array: np.ndarray = np.empty(length, dtype)
        else:
            if out.dtype != dtype or out.shape != (length,):
                raise ValueError(
                    f"out is {out.dtype}{list(out.shape)}; it must be {np.dtype(dtype)}[{length}]"
                )
            self.array = writable(out)

    def done(self) -> np.ndarray:
        return self.array if self.out is None else write_back(self.array, self.out)


def writable(array: np.ndarray) -> np.ndarray:
    """Return the array, or a copy if the library cannot write it."""
    if not array.flags.writeable:
        raise ValueError("out is read-only")
    return array if _is_plain(array) else array.copy()


def write_back(result: np.ndarray, out: np.ndarray) -> np.ndarray:
    if result is not out:
        out[...] = result
    return out


def checked_norms(norms: np.ndarray, elements: int, bucket_size: int) -> np.ndarray:
    check_bucket_size(bucket_size)
    if len(norms) < buckets(elements, bucket_size):
        raise ValueError(
            f"norms: {len(norms)} norms for {elements} elements in buckets of {bucket_size}; "
            f"{buckets(elements, bucket_size)} are needed"
        )
    return validated(norms, np.float32, "norms")


def checked_code_words(words: np.ndarray, elements: int, bits: int) -> np.ndarray:
    if len(words) < code_words(elements, bits):
        raise ValueError(f"words: {len(words)} words cannot hold {elements} codes of {bits} bits")
    return validated(words, np.int32, "words")


def checked_sum_words(words: np.ndarray, elements: int, width: int) -> np.ndarray:
    check_range("width", width, 1, 16)
    if len(words) != sum_words(elements, width):
        raise ValueError(f"words: {len(words)} words cannot hold {elements} digits of {width} bits")
    return validated(words, np.int32, "words")


def pointers(arrays: Sequence[np.ndarray]) -> ctypes.Array:
    return (POINTER * len(arrays))(*map(address, arrays))


def words_of(key: Key) -> ctypes.Array:
    return KEY(*key)
