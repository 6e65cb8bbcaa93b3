"""Validation and conversion of arguments for the functions of `native` and `native_segments`."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_quant.kernels import checks
from horovod_quant.kernels.arrays import address
from horovod_quant.kernels.buffer_view import BufferView
from horovod_quant.kernels.keys import Key
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


def out_array(out: np.ndarray | None, length: int, dtype: type) -> np.ndarray:
    """Return the array for a kernel's result, which `write_back` then takes."""
    if out is None:
        return np.empty(length, dtype)
    if out.dtype != dtype or out.shape != (length,):
        raise ValueError(f"out is {out.dtype}{list(out.shape)}; it must be {np.dtype(dtype)}[{length}]")
    return writable(out)


def writable(array: np.ndarray) -> np.ndarray:
    """Return the array, or a copy if the library cannot write it."""
    if not array.flags.writeable:
        raise ValueError("out is read-only")
    return array if _is_plain(array) else array.copy()


def write_back(result: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    """Return the result, in ``out`` if given."""
    if out is None or result is out:
        return result
    out[...] = result
    return out


def checked_norms(norms: np.ndarray, elements: int, bucket_size: int) -> np.ndarray:
    checks.check_bucket_size(bucket_size)
    checks.check_norms(len(norms), elements, bucket_size)
    return validated(norms, np.float32, "norms")


def checked_code_words(words: np.ndarray, elements: int, bits: int) -> np.ndarray:
    checks.check_code_words(len(words), elements, bits)
    return validated(words, np.int32, "words")


def checked_sum_words(words: np.ndarray, elements: int, width: int) -> np.ndarray:
    checks.check_range("width", width, 1, 16)
    checks.check_sum_words(len(words), elements, width)
    return validated(words, np.int32, "words")


def pointers(arrays: Sequence[np.ndarray]) -> ctypes.Array:
    return (POINTER * len(arrays))(*map(address, arrays))


def words_of(key: Key) -> ctypes.Array:
    return KEY(*key)


# ---- many gradients in one call (native_each.h)


class SegmentTable:
    """Addresses, types and numbers of elements of gradients, in the library's format.

    Args:
        arrays: flat arrays of floating-point types.
        name: name of the argument, for messages.
        is_written: True for results, which `done` copies to arrays that the library cannot write.

    Attributes:
        elements, lengths: the numbers of elements, as a tuple and as an array.
        gradients: the library's arguments for gradients that it reads.
    """

    def __init__(
        self, arrays: Sequence[np.ndarray | BufferView], name: str = "x", is_written: bool = False
    ) -> None:
        self._name = name
        self._copies: list[tuple[Any, Any]] = []
        if is_written:
            results = [array if type(array) is BufferView else writable(array) for array in arrays]
            self._copies = [(result, out) for result, out in zip(results, arrays) if result is not out]
            arrays = results
        self._kept = [array if type(array) is BufferView else flat(array, name) for array in arrays]
        self.count = len(arrays)
        found = [each.address if type(each) is BufferView else address(each) for each in self._kept]
        self._data = np.array(found, np.uintp)
        self._types = np.array([type_of(array, name) for array in self._kept], np.int64)
        self.elements = tuple([array.shape[0] for array in self._kept])
        self.lengths = np.array(self.elements, np.int64)
        self.data, self.types, self.counts = map(address, (self._data, self._types, self.lengths))
        self.gradients = (self.count, self.data, self.types, self.counts)

    def is_of(self, arrays: Sequence[np.ndarray | BufferView]) -> bool:
        """True if it describes exactly these arrays, in writable memory."""
        same = len(arrays) == self.count and all(map(operator.is_, self._kept, arrays))
        return same and all(type(array) is BufferView or array.flags.writeable for array in arrays)

    def check_state_of(self, gradients: SegmentTable) -> None:
        """Raise ValueError unless these are float32 arrays with the gradients' lengths."""
        is_wrong = (self._types != FLOAT32) | (self.lengths != gradients.lengths)
        if is_wrong.any():
            i = int(is_wrong.argmax())
            found, length = self._kept[i], gradients.lengths[i]
            raise ValueError(
                f"{self._name}[{i}] is {found.dtype}{list(found.shape)}; it must be float32[{length}]"
            )

    def done(self) -> None:
        """Copy results to the arrays that the library could not write."""
        for result, out in self._copies:
            write_back(result, out)


def addresses(arrays: Sequence[np.ndarray], offsets: np.ndarray) -> np.ndarray:
    """Return addresses in each worker's array of 4-byte elements, ``[offsets, workers]``."""
    bases = np.array([address(array) for array in arrays], np.int64)
    return (bases + 4 * offsets[:, None]).astype(np.uintp)
