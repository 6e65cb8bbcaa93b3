"""Gradients' addresses for kernels of many gradients in one call (native_each.h)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from horovod_quant.kernels.arrays import address
from horovod_quant.kernels.buffer_view import BufferView
from horovod_quant.kernels.checks import check_bucket_size, check_range
from horovod_quant.kernels.layout import ROW, code_words
from horovod_quant.kernels.native_arguments import FLOAT32, flat, type_of, validated, writable, write_back
from horovod_quant.kernels.rotation import rotated_elements


class SegmentTable:
    """Addresses, types and numbers of elements of gradients, in the library's format.

    Args:
        arrays: flat arrays of floating-point types.
        name: name of the argument, for messages.
    """

    def __init__(self, arrays: Sequence[np.ndarray | BufferView], name: str = "x") -> None:
        self._name = name
        self._kept = [array if type(array) is BufferView else flat(array, name) for array in arrays]
        self.count = len(arrays)
        found = [each.address if type(each) is BufferView else address(each) for each in self._kept]
        self._data = np.array(found, np.uintp)
        self._types = np.array([type_of(array, name) for array in self._kept], np.int64)
        self.lengths = np.array([array.shape[0] for array in self._kept], np.int64)
        self.data, self.types, self.counts = map(address, (self._data, self._types, self.lengths))
        self._buckets: dict[int, int] = {}
        self._sum_words: dict[int, int] = {}

    def is_of(self, arrays: Sequence[np.ndarray | BufferView]) -> bool:
        """True if it describes exactly these arrays, in writable memory."""
        same = len(arrays) == self.count and all(map(operator.is_, self._kept, arrays))
        return same and all(type(array) is BufferView or array.flags.writeable for array in arrays)

    def buckets(self, bucket_size: int) -> int:
        found = self._buckets.get(bucket_size)
        if found is None:
            check_bucket_size(bucket_size)
            found = self._buckets[bucket_size] = int((-(-self.lengths // bucket_size)).sum())
        return found

    def sum_words(self, width: int) -> int:
        found = self._sum_words.get(width)
        if found is None:
            check_range("width", width, 1, 16)
            rows = -(-self.lengths // ROW)
            found = self._sum_words[width] = ROW * int((-(-rows // (32 // width))).sum())
        return found

    def code_words(self, bits: int) -> np.ndarray:
        """Return each gradient's number of words for its codes."""
        return np.array([_code_words(bits, length) for length in self.lengths.tolist()], np.int64)

    def rotated_words(self, bits: int) -> np.ndarray:
        """Return each gradient's number of words for its rotated elements."""
        check_range("bits", bits, 1, 4)
        lengths = [_rotated_words(bits, length) for length in self.lengths.tolist()]
        return np.array(lengths, np.int64)

    def check_state_of(self, gradients: SegmentTable) -> None:
        """Raise ValueError unless these are float32 arrays with the gradients' lengths."""
        is_wrong = (self._types != FLOAT32) | (self.lengths != gradients.lengths)
        if is_wrong.any():
            i = int(is_wrong.argmax())
            found, length = self._kept[i], gradients.lengths[i]
            raise ValueError(
                f"{self._name}[{i}] is {found.dtype}{list(found.shape)}; it must be float32[{length}]"
            )

    def norms(self, norms: np.ndarray, bucket_size: int) -> np.ndarray:
        """Return the validated norms of all buckets."""
        if len(norms) != self.buckets(bucket_size):
            raise ValueError(f"norms: {len(norms)} norms for {self.buckets(bucket_size)} buckets")
        return validated(norms, np.float32, "norms")


@lru_cache(maxsize=4096)  # every step's gradients have the same lengths
def _code_words(bits: int, elements: int) -> int:
    return code_words(elements, bits)


@lru_cache(maxsize=4096)
def _rotated_words(bits: int, elements: int) -> int:
    return code_words(rotated_elements(elements), bits)


class Outs:
    """Result arrays of a kernel, and their table.

    Args:
        outs: the arrays; results are copied to those whose memory the library cannot write.
        table: a table to reuse if it describes ``outs``.
        name: name of the argument, for messages.
    """

    def __init__(
        self, outs: Sequence[np.ndarray | BufferView], table: SegmentTable | None = None, name: str = "out"
    ) -> None:
        self._copies: list[tuple[Any, Any]] = []
        if table is None or not table.is_of(outs):
            results = [out if type(out) is BufferView else writable(out) for out in outs]
            self._copies = [(result, out) for result, out in zip(results, outs) if result is not out]
            table = SegmentTable(results, name)
        self.table = table

    def done(self) -> None:
        for result, out in self._copies:
            write_back(result, out)


def addresses(arrays: Sequence[np.ndarray], offsets: np.ndarray) -> np.ndarray:
    """Return addresses in each worker's array of 4-byte elements, ``[offsets, workers]``."""
    bases = np.array([address(array) for array in arrays], np.int64)
    return (bases + 4 * offsets[:, None]).astype(np.uintp)


def check_offsets(what: str, offsets: np.ndarray, lengths: np.ndarray, room: int) -> None:
    """Raise ValueError unless all gradients' words or norms are within the array."""
    if offsets.shape != lengths.shape or (offsets < 0).any() or (offsets + lengths > room).any():
        raise ValueError(
            f"offsets of {len(lengths)} gradients' {what} {offsets}: not all within {room} words"
        )
