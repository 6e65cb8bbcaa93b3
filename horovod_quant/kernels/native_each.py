"""Kernels of `native` for many gradients in one call (native_each.h).

A call costs more than the work on a small gradient. Each function is bit-identical to one call per gradient of the
kernel without ``_each``. `native_segments` calls them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from horovod_quant.kernels.arrays import address, aligned_empty
from horovod_quant.kernels.buffer_view import BufferView
from horovod_quant.kernels.checks import check_bucket_size, check_range
from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import ROW, TILE, code_words
from horovod_quant.kernels.native_arguments import (
    FLOAT32,
    MAX_LEVELS,
    Out,
    flat,
    type_of,
    validated,
    writable,
    write_back,
)
from horovod_quant.kernels.native_library import call
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


class _Outs:
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


def _keys_and_starts(
    keys: np.ndarray, starts: Sequence[int], count: int, workers: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return validated keys and starts.

    Keys are uint32 ``[gradients, fields of Key]``, with workers ``[gradients, workers, fields of Key]``.
    """
    keys, first = np.ascontiguousarray(keys, np.uint32), np.array(starts, np.int64)
    each = (count,) if workers is None else (count, workers)
    if keys.shape != (*each, len(Key._fields)) or first.shape != (count,):
        raise ValueError(f"keys are {list(keys.shape)} and starts {list(first.shape)}, of {count} gradients")
    return keys, first


# ---- norms and their codes ---------------------------------------------------------------------------------------


def bucket_maxima_each(table: SegmentTable, bucket_size: int) -> np.ndarray:
    return _norms_each("bucket_maxima_each", table, bucket_size, np.float32)


def bucket_square_sums_each(table: SegmentTable, bucket_size: int) -> np.ndarray:
    return _norms_each("bucket_square_sums_each", table, bucket_size, np.float64)


def _norms_each(kernel: str, table: SegmentTable, bucket_size: int, dtype: type) -> np.ndarray:
    out = aligned_empty(table.buckets(bucket_size), dtype)
    call(kernel, table.count, table.data, table.types, table.counts, bucket_size, address(out))
    return out


_MOST_BITS = {"uniform": 16, "exponential": 8}
_KERNELS = {"uniform": "uniform_codes", "exponential": "exponential"}
_NORM_KINDS = {"max": 1, "l2": 2}  # NormKind of native_encoders.h


def encode_norms_and_codes_each(
    levels: str,
    norm: str,
    table: SegmentTable,
    bucket_size: int,
    bits: int,
    keys: np.ndarray,
    starts: Sequence[int],
    at: np.ndarray,
    out: np.ndarray,
) -> np.ndarray:
    """Encode norms and codes of gradients.

    Gradient i's norms, then its codes, begin at ``out[at[i]]``.

    Args:
        levels: ``"uniform"`` or ``"exponential"``.
        norm: ``"max"`` or ``"l2"``.
        keys: uint32 ``[gradients, fields of Key]``.
    """
    check_range("bits", bits, 2, _MOST_BITS[levels])
    check_bucket_size(bucket_size)
    keys, first = _keys_and_starts(keys, starts, table.count)
    at = np.ascontiguousarray(at, np.int64)
    _check_offsets("payloads", at, -(-table.lengths // bucket_size) + table.code_words(bits), len(out))
    result = Out(out, len(out), np.int32)
    call(
        "encode_norms_and_codes_each", table.count, table.data, table.types, table.counts, levels == "exponential",
        _NORM_KINDS[norm], bucket_size, bits, address(keys), address(first), address(at), address(result.array),
    )  # fmt: skip
    return result.done()


def decode_codes_each(
    levels: str,
    pieces: Sequence[np.ndarray],
    words_at: np.ndarray,
    norms: Sequence[np.ndarray],
    norms_at: np.ndarray,
    bucket_size: int,
    bits: int,
    factor: float,
    outs: Sequence[np.ndarray],
    table: SegmentTable | None = None,
) -> None:
    """Decode the sum of the workers' codes of each gradient.

    The words of gradient i begin at ``words_at[i]`` of each worker's piece, its norms at ``norms_at[i]`` of each
    worker's norms. ``table`` is reused if it describes ``outs``.
    """
    check_range("bits", bits, 2, _MOST_BITS[levels])
    check_bucket_size(bucket_size)
    if not 0 < len(pieces) == len(norms):
        raise ValueError(f"{len(pieces)} workers' pieces and {len(norms)} workers' norms")
    results = _Outs(outs, table)
    table = results.table
    _check_offsets("words", words_at, table.code_words(bits), min(map(len, pieces)))
    _check_offsets("norms", norms_at, -(-table.lengths // bucket_size), min(map(len, norms)))
    pieces = [validated(piece, np.int32, "pieces") for piece in pieces]
    norms = [validated(one, np.float32, "norms") for one in norms]
    words, first_norms = _addresses(pieces, words_at), _addresses(norms, norms_at)
    units = np.empty(16 * len(pieces), np.float32)
    call(
        f"decode_{_KERNELS[levels]}_each", table.count, address(words), address(first_norms), len(pieces),
        table.counts, bucket_size, bits, factor, address(units), table.data, table.types,
    )  # fmt: skip
    results.done()


def _addresses(arrays: Sequence[np.ndarray], offsets: np.ndarray) -> np.ndarray:
    """Return addresses in each worker's array of 4-byte elements, ``[offsets, workers]``."""
    bases = np.array([address(array) for array in arrays], np.int64)
    return (bases + 4 * offsets[:, None]).astype(np.uintp)


def _check_offsets(what: str, offsets: np.ndarray, lengths: np.ndarray, room: int) -> None:
    """Raise ValueError unless all gradients' words or norms are within the array."""
    if offsets.shape != lengths.shape or (offsets < 0).any() or (offsets + lengths > room).any():
        raise ValueError(
            f"offsets of {len(lengths)} gradients' {what} {offsets}: not all within {room} words"
        )


# ---- sums of uniform levels --------------------------------------------------------------------------------------


def encode_uniform_sum_each(
    table: SegmentTable,
    norms: np.ndarray,
    bucket_size: int,
    levels: int,
    width: int,
    keys: np.ndarray,
    starts: Sequence[int],
    out: np.ndarray,
) -> np.ndarray:
    """Encode gradients as integers to be added.

    ``keys`` is uint32 ``[gradients, fields of Key]``.
    """
    check_range("levels", levels, 1, MAX_LEVELS)
    norms = table.norms(norms, bucket_size)
    keys, first = _keys_and_starts(keys, starts, table.count)
    result = Out(out, table.sum_words(width), np.int32)
    call(
        "encode_uniform_sum_each", table.count, table.data, table.types, table.counts, address(norms), bucket_size,
        levels, address(keys), address(first), width, address(result.array),
    )  # fmt: skip
    return result.done()


def decode_uniform_sum_each(
    words: np.ndarray,
    norms: np.ndarray,
    bucket_size: int,
    levels: int,
    width: int,
    factor: float,
    outs: Sequence[np.ndarray],
    table: SegmentTable | None = None,
) -> None:
    """Decode sums of integers to gradients.

    ``table`` is reused if it describes ``outs``.
    """
    check_range("levels", levels, 1, MAX_LEVELS)
    results = _Outs(outs, table)
    table = results.table
    norms = table.norms(norms, bucket_size)
    if len(words) != table.sum_words(width):
        raise ValueError(f"words: {len(words)} words cannot hold all digits of {width} bits")
    words = validated(words, np.int32, "words")
    call(
        "decode_uniform_sum_each", table.count, address(words), address(norms), table.counts, bucket_size, levels,
        width, factor, table.data, table.types,
    )  # fmt: skip
    results.done()


# ---- one bit -----------------------------------------------------------------------------------------------------


def binarize_each(
    table: SegmentTable,
    momenta: Sequence[np.ndarray | BufferView],
    scales: Sequence[np.ndarray | BufferView],
    betas: Sequence[float],
    keys: np.ndarray,
    starts: Sequence[int],
    words_at: np.ndarray,
    out: np.ndarray,
) -> np.ndarray:
    """Update states and draw bits, gradient i's words from ``out[words_at[i]]`` on.

    Return all tiles' flags. ``keys`` is uint32 ``[gradients, fields of Key]``.
    """
    if not len(momenta) == len(scales) == len(betas) == table.count:
        raise ValueError(
            f"{len(momenta)} momenta, {len(scales)} scales and {len(betas)} betas, of {table.count} gradients"
        )
    m, b = _Outs(momenta, name="momenta"), _Outs(scales, name="scales")
    m.table.check_state_of(table)
    b.table.check_state_of(table)
    given = np.array(betas, np.float64)
    keep, take = given.astype(np.float32), (1.0 - given).astype(np.float32)
    keys, first = _keys_and_starts(keys, starts, table.count)
    _check_offsets("words", words_at, ROW * -(-table.lengths // TILE), len(out))
    broken = np.empty(table.buckets(TILE), bool)
    result = Out(out, len(out), np.int32)
    words = np.array(address(result.array) + 4 * words_at, np.uintp)
    call(
        "binarize_each", table.count, table.data, table.types, table.counts, m.table.data, b.table.data,
        address(keep), address(take), address(keys), address(first), address(words), address(broken),
    )  # fmt: skip
    result.done()
    m.done()
    b.done()
    return broken


def vote_each(
    pieces: Sequence[np.ndarray],
    words_at: np.ndarray,
    tile_counts: np.ndarray,
    keys: np.ndarray,
    starts: Sequence[int],
    out: np.ndarray,
) -> None:
    """Draw bits from the averages of the workers' bits.

    The workers' pieces and ``out`` have the layout of `binarize_each`. ``keys`` is uint32
    ``[gradients, fields of Key]``.
    """
    if not pieces or (tile_counts < 0).any():
        raise ValueError(f"{len(pieces)} workers' pieces, and tiles {tile_counts}: give at least one of each")
    _check_offsets("words", words_at, ROW * tile_counts, min(len(out), *map(len, pieces)))
    pieces = [validated(piece, np.int32, "pieces") for piece in pieces]
    keys, first = _keys_and_starts(keys, starts, len(tile_counts))
    result = Out(out, len(out), np.int32)
    words, results = _addresses(pieces, words_at), _addresses([result.array], words_at)
    call(
        "vote_each", len(tile_counts), address(tile_counts), address(words), len(pieces), address(keys),
        address(first), address(results),
    )  # fmt: skip
    result.done()


def decode_signs_each(
    piece: np.ndarray, words_at: np.ndarray, magnitude: float, outs: Sequence[np.ndarray]
) -> None:
    """Decode bits to plus or minus the magnitude.

    ``piece`` has the layout of `binarize_each`.
    """
    results = _Outs(outs)
    table = results.table
    _check_offsets("words", words_at, ROW * -(-table.lengths // TILE), len(piece))
    piece = validated(piece, np.int32, "piece")  # a copy has to outlive the call
    words = _addresses([piece], words_at)
    call("decode_signs_each", table.count, address(words), table.counts, magnitude, table.data, table.types)
    results.done()


# ---- rotation ----------------------------------------------------------------------------------------------------


def encode_rotated_each(
    table: SegmentTable,
    bits: int,
    keys: np.ndarray,
    starts: Sequence[int],
    words_at: np.ndarray,
    scales_at: np.ndarray,
    out: np.ndarray,
    trellis: bool = False,
) -> np.ndarray:
    """Encode rotated codes of gradients.

    Gradient i's words begin at ``out[words_at[i]]``, its scales, the bits of float32, at ``out[scales_at[i]]``.
    ``keys`` is uint32 ``[gradients, fields of Key]``.
    """
    keys, first = _keys_and_starts(keys, starts, table.count)
    _check_rotated(table, bits, words_at, scales_at, len(out))
    result = Out(out, len(out), np.int32)
    base = address(result.array)
    words, scales = (np.array(base + 4 * at, np.uintp) for at in (words_at, scales_at))
    call(
        "encode_rotated_each", table.count, table.data, table.types, table.counts, bits, trellis, address(keys),
        address(first), address(words), address(scales),
    )  # fmt: skip
    return result.done()


def add_rotated_each(
    pieces: Sequence[np.ndarray],
    words_at: np.ndarray,
    scales_at: np.ndarray,
    bits: int,
    keys: np.ndarray,
    factor: float,
    outs: Sequence[np.ndarray],
    starts: Sequence[int],
    table: SegmentTable | None = None,
    trellis: bool = False,
) -> None:
    """Decode the sum of the workers' rotated codes.

    Their pieces have the layout of `encode_rotated_each`. ``keys`` is uint32 ``[gradients, workers, fields of Key]``;
    ``table`` is reused if it describes ``outs``.
    """
    if not pieces:
        raise ValueError("no pieces to add")
    results = _Outs(outs, table)
    table = results.table
    keys, first = _keys_and_starts(keys, starts, table.count, len(pieces))
    _check_rotated(table, bits, words_at, scales_at, min(map(len, pieces)))
    pieces = [validated(piece, np.int32, "pieces") for piece in pieces]
    words, scales = (_addresses(pieces, at) for at in (words_at, scales_at))
    call(
        "add_rotated_each", table.count, address(words), address(scales), len(pieces), table.counts, bits, trellis,
        factor, address(keys), address(first), table.data, table.types,
    )  # fmt: skip
    results.done()


def _check_rotated(
    table: SegmentTable, bits: int, words_at: np.ndarray, scales_at: np.ndarray, room: int
) -> None:
    _check_offsets("words", words_at, table.rotated_words(bits), room)
    _check_offsets("scales", scales_at, -(-table.lengths // TILE), room)


def scale_each(table: SegmentTable, factor: float, outs: Sequence[np.ndarray]) -> None:
    """Write elements in float32 times a factor to floating-point arrays."""
    results = _Outs(outs)
    if (results.table.lengths != table.lengths).any():
        raise ValueError(f"out: arrays of {results.table.lengths} elements for {table.lengths}")
    call(
        "scale_each", table.count, table.data, table.types, table.counts, factor, results.table.data,
        results.table.types,
    )  # fmt: skip
    results.done()
