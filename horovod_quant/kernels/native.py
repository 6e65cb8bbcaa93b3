"""The C++ kernels (native.cpp): the same functions as `reference`, which says what they mean, and the same bits.

Arrays are checked here, so that no call goes out of their bounds; those that are not contiguous or not aligned are
copied. A call releases Python's global lock. The library itself is `native_library`'s.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Sequence

import numpy as np

from horovod_quant.kernels import clipping, entropy, reference, rotated_sums, rotation, sums
from horovod_quant.kernels.arrays import (
    TILES_AT_A_TIME,
    address,
    aligned_empty,
    assemble,
    concatenate,
    decode_parts,
    key_of_word,
    pack_flags,
    step_word,
    target,
    unpack_flags,
    view,
    with_nan_tiles,
)
from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import ROW, TILE, buckets, code_words, sum_words, tiles
from horovod_quant.kernels.native_library import POINTER, call
from horovod_quant.kernels.reference import (
    add_exponential,
    decoding_scales,
    exponential_values,
    less,
    mean,
    minimum,
    next_powers_of_two,
    norms_of_square_sums,
    scale,
    to_float16,
    to_float32,
    where,
)

__all__ = [
    "with_nan_tiles",
    "view",
    "unpack_flags",
    "target",
    "step_word",
    "pack_flags",
    "key_of_word",
    "decode_parts",
    "concatenate",
    "assemble",
    "TILES_AT_A_TIME",
    "add_exponential",
    "add_rotated",
    "binarize",
    "bucket_magnitude_sums",
    "bucket_maxima",
    "bucket_square_sums",
    "bucket_sums",
    "clip",
    "codes_of_digits",
    "decode_exponential",
    "decode_rotated",
    "decode_rotated_sum",
    "decode_signs",
    "decode_uniform_codes",
    "decode_uniform_sum",
    "decoding_scales",
    "elias_decode_codes",
    "elias_encode_codes",
    "encode_exponential",
    "encode_rotated",
    "encode_rotated_sum",
    "encode_uniform_codes",
    "encode_uniform_sum",
    "exponential_values",
    "less",
    "mean",
    "minimum",
    "next_powers_of_two",
    "norms_of_square_sums",
    "pack_codes",
    "pack_sum",
    "rotated_samples",
    "rotated_sum_checks",
    "round_exponential",
    "round_uniform",
    "scale",
    "tensor_deviation",
    "tensor_maximum",
    "tensor_mean_magnitude",
    "to_float16",
    "to_float32",
    "unpack_codes",
    "unpack_sum",
    "vote",
    "where",
]

NAME = "native"

_KEY = ctypes.c_uint32 * len(Key._fields)

_TYPES = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 1,
    np.dtype(np.float64): 2,
    np.dtype(np.uint16): 3,  # the bits of bfloat16
}

MAX_LEVELS = 2**15 - 1


# ---- arguments ---------------------------------------------------------------------------------------------------


def _is_plain(array: np.ndarray) -> bool:
    flags = array.flags
    return flags.c_contiguous and flags.aligned


def _flat(array: np.ndarray, name: str) -> np.ndarray:
    """The array if its memory can be read as it is, else a copy."""
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; it must be flat")
    return array if _is_plain(array) else array.copy()


def _input(array: np.ndarray, dtype: type, name: str) -> np.ndarray:
    if array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {np.dtype(dtype)}")
    return _flat(array, name)


def _type(array: np.ndarray, name: str) -> int:
    if array.dtype not in _TYPES:
        raise TypeError(
            f"{name} has dtype {array.dtype}; it must be float32, float16, float64, or bfloat16 as uint16"
        )
    return _TYPES[array.dtype]


class _Out:
    """An array that a kernel fills: ``out`` itself, or one that is copied to it in the end."""

    def __init__(self, out: np.ndarray | None, length: int, dtype: type) -> None:
        self.out = out
        if out is None:
            self.array: np.ndarray = np.empty(length, dtype)
        else:
            if out.dtype != dtype or out.shape != (length,):
                raise ValueError(
                    f"out is {out.dtype}{list(out.shape)}; it must be {np.dtype(dtype)}[{length}]"
                )
            self.array = _writable(out)

    def done(self) -> np.ndarray:
        return self.array if self.out is None else _write_back(self.array, self.out)


def _writable(array: np.ndarray) -> np.ndarray:
    """The array if its memory can be written as it is, else a copy to be written back."""
    if not array.flags.writeable:
        raise ValueError("out is read-only")
    return array if _is_plain(array) else array.copy()


def _write_back(result: np.ndarray, out: np.ndarray) -> np.ndarray:
    if result is not out:
        out[...] = result
    return out


def _check_bucket_size(bucket_size: int) -> None:
    if bucket_size < ROW or bucket_size % ROW:
        raise ValueError(f"bucket_size={bucket_size}: use a multiple of {ROW}")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value}: use {low} to {high}")


def _norms(norms: np.ndarray, elements: int, bucket_size: int) -> np.ndarray:
    _check_bucket_size(bucket_size)
    if len(norms) < buckets(elements, bucket_size):
        raise ValueError(
            f"norms: {len(norms)} norms for {elements} elements in buckets of {bucket_size}; "
            f"{buckets(elements, bucket_size)} are needed"
        )
    return _input(norms, np.float32, "norms")


def _code_words(words: np.ndarray, elements: int, bits: int) -> np.ndarray:
    if len(words) < code_words(elements, bits):
        raise ValueError(f"words: {len(words)} words cannot hold {elements} codes of {bits} bits")
    return _input(words, np.int32, "words")


def _sum_words(words: np.ndarray, elements: int, width: int) -> np.ndarray:
    _check_range("width", width, 1, 16)
    if len(words) != sum_words(elements, width):
        raise ValueError(f"words: {len(words)} words cannot hold {elements} digits of {width} bits")
    return _input(words, np.int32, "words")


def _pointers(arrays: Sequence[np.ndarray]) -> ctypes.Array:
    return (POINTER * len(arrays))(*map(address, arrays))


def _words(key: Key) -> ctypes.Array:
    return _KEY(*key)


# ---- norms -------------------------------------------------------------------------------------------------------


def bucket_maxima(x: np.ndarray, bucket_size: int, out: np.ndarray | None = None) -> np.ndarray:
    return _bucket_norms("bucket_maxima", x, bucket_size, out, np.float32)


def bucket_square_sums(x: np.ndarray, bucket_size: int, out: np.ndarray | None = None) -> np.ndarray:
    return _bucket_norms("bucket_square_sums", x, bucket_size, out, np.float64)


def bucket_sums(x: np.ndarray, bucket_size: int, out: np.ndarray | None = None) -> np.ndarray:
    return _bucket_norms("bucket_sums", x, bucket_size, out, np.float64)


def bucket_magnitude_sums(x: np.ndarray, bucket_size: int, out: np.ndarray | None = None) -> np.ndarray:
    return _bucket_norms("bucket_magnitude_sums", x, bucket_size, out, np.float64)


def tensor_maximum(x: np.ndarray) -> np.ndarray:
    return sums.tensor_maximum(sys.modules[__name__], x)


def tensor_mean_magnitude(x: np.ndarray) -> np.ndarray:
    return sums.tensor_mean_magnitude(sys.modules[__name__], x)


def tensor_deviation(x: np.ndarray) -> np.ndarray:
    return sums.tensor_deviation(sys.modules[__name__], x)


def _bucket_norms(kernel, x, bucket_size, out, dtype):
    kind = _type(x, "x")
    x = _flat(x, "x")
    _check_bucket_size(bucket_size)
    result = _Out(out, buckets(len(x), bucket_size), dtype)
    call(kernel, address(x), kind, len(x), bucket_size, address(result.array))
    return result.done()


def clip(x: np.ndarray, most: float) -> np.ndarray:
    return clipping.clip(sys.modules[__name__], x, most)


# ---- uniform levels ----------------------------------------------------------------------------------------------


def round_uniform(
    x: np.ndarray, norms: np.ndarray, bucket_size: int, levels: int, key: Key, start: int = 0
) -> np.ndarray:
    _check_range("levels", levels, 1, MAX_LEVELS)
    return _encode("round_uniform", x, norms, bucket_size, (levels, _words(key), start), len(x), None)


def encode_uniform_sum(
    x: np.ndarray,
    norms: np.ndarray,
    bucket_size: int,
    levels: int,
    width: int,
    key: Key,
    start: int = 0,
    out: np.ndarray | None = None,
) -> np.ndarray:
    _check_range("levels", levels, 1, MAX_LEVELS)
    _check_range("width", width, 1, 16)
    arguments = (levels, _words(key), start, width)
    return _encode("encode_uniform_sum", x, norms, bucket_size, arguments, sum_words(len(x), width), out)


def encode_uniform_codes(
    x: np.ndarray,
    norms: np.ndarray,
    bucket_size: int,
    bits: int,
    key: Key,
    start: int = 0,
    out: np.ndarray | None = None,
) -> np.ndarray:
    _check_range("bits", bits, 2, 16)
    arguments = (_words(key), start, bits)
    return _encode("encode_uniform_codes", x, norms, bucket_size, arguments, code_words(len(x), bits), out)


def _encode(kernel, x, norms, bucket_size, arguments, length, out):
    kind = _type(x, "x")
    x = _flat(x, "x")
    norms = _norms(norms, len(x), bucket_size)
    result = _Out(out, length, np.int32)
    call(
        kernel, address(x), kind, len(x), address(norms), bucket_size, *arguments, address(result.array)
    )  # fmt: skip
    return result.done()


def decode_uniform_sum(
    words: np.ndarray,
    norms: np.ndarray,
    bucket_size: int,
    levels: int,
    width: int,
    factor: float,
    out: np.ndarray,
) -> np.ndarray:
    _check_range("levels", levels, 1, MAX_LEVELS)
    words = _sum_words(words, len(out), width)
    norms = _norms(norms, len(out), bucket_size)
    arguments = (len(out), bucket_size, levels, width, factor)
    return _decode("decode_uniform_sum", address(words), address(norms), arguments, out)


def decode_uniform_codes(
    words: Sequence[np.ndarray],
    norms: Sequence[np.ndarray],
    bucket_size: int,
    bits: int,
    factor: float,
    out: np.ndarray,
) -> np.ndarray:
    _check_range("bits", bits, 2, 16)
    return _decode_workers("decode_uniform_codes", words, norms, bucket_size, bits, factor, out)


def _decode_workers(kernel, words, norms, bucket_size, bits, factor, out):
    if not 0 < len(words) == len(norms):
        raise ValueError(f"{len(words)} workers' words and {len(norms)} workers' norms")
    words = [_code_words(own, len(out), bits) for own in words]
    norms = [_norms(own, len(out), bucket_size) for own in norms]
    units = np.empty(16 * len(words), np.float32)
    arguments = (len(words), len(out), bucket_size, bits, factor, address(units))
    return _decode(kernel, _pointers(words), _pointers(norms), arguments, out)


def _decode(kernel, words, norms, arguments, out):
    kind = _type(out, "out")
    result = _Out(out, len(out), out.dtype)
    call(kernel, words, norms, *arguments, address(result.array), kind)
    return result.done()


# ---- many gradients in one call ----------------------------------------------------------------------------------
#
# As many calls of the kernel without _each, whose results follow one another. No other backend has them: a scheme asks
# whether there is a Table.


class Table:
    """Gradients' data, types and numbers of elements, as the library takes them.

    Args:
        arrays: flat, of floating-point types.
        name: of the argument, for messages.
    """

    def __init__(self, arrays: Sequence[np.ndarray], name: str = "x") -> None:
        self._kept = [_flat(array, name) for array in arrays]
        self.count = len(arrays)
        self._data = np.array([address(array) for array in self._kept], np.uintp)
        self._types = np.array([_type(array, name) for array in self._kept], np.int64)
        self.lengths = np.array([len(array) for array in self._kept], np.int64)
        self.data, self.types, self.counts = map(address, (self._data, self._types, self.lengths))

    def is_of(self, arrays: Sequence[np.ndarray]) -> bool:
        """Whether it is of these very arrays, and their memory can be written."""
        same = len(arrays) == self.count and all(map(operator.is_, self._kept, arrays))
        return same and all(array.flags.writeable for array in arrays)

    def buckets(self, bucket_size: int) -> int:
        _check_bucket_size(bucket_size)
        return int((-(-self.lengths // bucket_size)).sum())

    def sum_words(self, width: int) -> int:
        _check_range("width", width, 1, 16)
        rows = -(-self.lengths // ROW)
        return ROW * int((-(-rows // (32 // width))).sum())

    def norms(self, norms: np.ndarray, bucket_size: int) -> np.ndarray:
        """Those of all buckets, checked."""
        if len(norms) != self.buckets(bucket_size):
            raise ValueError(f"norms: {len(norms)} norms for {self.buckets(bucket_size)} buckets")
        return _input(norms, np.float32, "norms")


def bucket_maxima_each(table: Table, bucket_size: int) -> np.ndarray:
    out = aligned_empty(table.buckets(bucket_size), np.float32)
    call("bucket_maxima_each", table.count, table.data, table.types, table.counts, bucket_size, address(out))
    return out


def encode_uniform_sum_each(
    table: Table,
    norms: np.ndarray,
    bucket_size: int,
    levels: int,
    width: int,
    keys: np.ndarray,
    starts: Sequence[int],
    out: np.ndarray,
) -> np.ndarray:
    """``keys`` is uint32 ``[gradients, fields of Key]``."""
    _check_range("levels", levels, 1, MAX_LEVELS)
    first = np.array(starts, np.int64)
    norms, keys = table.norms(norms, bucket_size), np.ascontiguousarray(keys, np.uint32)
    if keys.shape != (table.count, len(Key._fields)) or first.shape != (table.count,):
        raise ValueError(
            f"keys are {list(keys.shape)} and starts {list(first.shape)}, of {table.count} gradients"
        )
    result = _Out(out, table.sum_words(width), np.int32)
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
    table: Table | None = None,
) -> None:
    """``table`` is used if it is that of ``outs``."""
    _check_range("levels", levels, 1, MAX_LEVELS)
    results = outs
    if table is None or not table.is_of(outs):
        results = [_writable(out) for out in outs]
        table = Table(results, "out")
    norms = table.norms(norms, bucket_size)
    if len(words) != table.sum_words(width):
        raise ValueError(f"words: {len(words)} words cannot hold all digits of {width} bits")
    words = _input(words, np.int32, "words")
    call(
        "decode_uniform_sum_each", table.count, address(words), address(norms), table.counts, bucket_size, levels,
        width, factor, table.data, table.types,
    )  # fmt: skip
    for result, out in zip(results, outs):
        _write_back(result, out)


# ---- exponential levels ------------------------------------------------------------------------------------------


def round_exponential(
    x: np.ndarray, norms: np.ndarray, bucket_size: int, bits: int, key: Key, start: int = 0
) -> np.ndarray:
    _check_range("bits", bits, 2, 8)
    return _encode("round_exponential", x, norms, bucket_size, (_words(key), start, bits), len(x), None)


def encode_exponential(
    x: np.ndarray,
    norms: np.ndarray,
    bucket_size: int,
    bits: int,
    key: Key,
    start: int = 0,
    out: np.ndarray | None = None,
) -> np.ndarray:
    _check_range("bits", bits, 2, 8)
    arguments = (_words(key), start, bits)
    return _encode("encode_exponential", x, norms, bucket_size, arguments, code_words(len(x), bits), out)


def decode_exponential(
    words: Sequence[np.ndarray],
    norms: Sequence[np.ndarray],
    bucket_size: int,
    bits: int,
    factor: float,
    out: np.ndarray,
) -> np.ndarray:
    _check_range("bits", bits, 2, 8)
    return _decode_workers("decode_exponential", words, norms, bucket_size, bits, factor, out)


# ---- one bit -----------------------------------------------------------------------------------------------------


def binarize(
    gradient: np.ndarray,
    momentum: np.ndarray,
    scale: np.ndarray,
    beta: float,
    key: Key,
    start: int = 0,
    out: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    kind = _type(gradient, "gradient")
    gradient = _flat(gradient, "gradient")
    count = len(gradient)
    m, b = _Out(momentum, count, np.float32), _Out(scale, count, np.float32)
    words = _Out(out, tiles(count) * ROW, np.int32)
    broken = np.empty(tiles(count), bool)
    call(
        "binarize", address(gradient), kind, count, address(m.array), address(b.array), beta, 1.0 - beta,
        _words(key), start, address(words.array), address(broken),
    )  # fmt: skip
    m.done()
    b.done()
    return words.done(), broken


def vote(words: Sequence[np.ndarray], key: Key, start: int = 0, out: np.ndarray | None = None) -> np.ndarray:
    if not words or len({len(own) for own in words}) > 1 or len(words[0]) % ROW:
        raise ValueError(
            f"words of lengths {[len(own) for own in words]}; they must be the same multiple of {ROW}"
        )
    words = [_input(own, np.int32, "words") for own in words]
    result = _Out(out, len(words[0]), np.int32)
    call(
        "vote", _pointers(words), len(words), len(words[0]) // ROW, _words(key), start, address(result.array)
    )
    return result.done()


def decode_signs(words: np.ndarray, magnitude: float, out: np.ndarray) -> np.ndarray:
    kind = _type(out, "out")
    words = _code_words(words, len(out), 1)
    result = _Out(out, len(out), out.dtype)
    call("decode_signs", address(words), len(out), magnitude, address(result.array), kind)
    return result.done()


# ---- rotation ----------------------------------------------------------------------------------------------------


def encode_rotated(
    x: np.ndarray,
    bits: int,
    key: Key,
    start: int = 0,
    out: np.ndarray | None = None,
    scales: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    _check_range("bits", bits, 1, 4)
    kind = _type(x, "x")
    x = _flat(x, "x")
    words = _Out(out, code_words(rotation.rotated_elements(len(x)), bits), np.int32)
    own_scales = _Out(scales, tiles(len(x)), np.float32)
    call(
        "encode_rotated", address(x), kind, len(x), bits, _words(key), start, address(words.array),
        address(own_scales.array),
    )  # fmt: skip
    return words.done(), own_scales.done()


def decode_rotated(
    words: np.ndarray, scales: np.ndarray, bits: int, key: Key, factor: float, out: np.ndarray, start: int = 0
) -> np.ndarray:
    return add_rotated([words], [scales], bits, [key], factor, out, start)


def add_rotated(
    words: Sequence[np.ndarray],
    scales: Sequence[np.ndarray],
    bits: int,
    keys: Sequence[Key],
    factor: float,
    out: np.ndarray,
    start: int = 0,
) -> np.ndarray:
    _check_range("bits", bits, 1, 4)
    rotation.check_workers(words, scales, keys)
    for own in scales:
        rotation.check_scales(len(own), len(out))
    words = [_code_words(own, rotation.rotated_elements(len(out)), bits) for own in words]
    scales = [_input(own, np.float32, "scales") for own in scales]
    signs = (_KEY * len(keys))(*map(_words, keys))
    arguments = (len(words), len(out), bits, factor, signs, start)
    return _decode("add_rotated", _pointers(words), _pointers(scales), arguments, out)


def rotated_samples(
    x: np.ndarray, samples: int, key: Key, start: int = 0, out: np.ndarray | None = None
) -> np.ndarray:
    _check_range("samples", samples, 1, TILE)
    kind = _type(x, "x")
    x = _flat(x, "x")
    result = _Out(out, tiles(len(x)) * samples, np.float32)
    call(
        "rotated_samples", address(x), kind, len(x), samples, _words(key), start, address(result.array)
    )  # fmt: skip
    return result.done()


def encode_rotated_sum(
    x: np.ndarray,
    steps: np.ndarray,
    width: int,
    signs: Key,
    key: Key,
    start: int = 0,
    out: np.ndarray | None = None,
    checks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    _check_range("width", width, 1, 16)
    rotated_sums.check_steps(len(steps), len(x))
    kind = _type(x, "x")
    x = _flat(x, "x")
    steps = _input(steps, np.float32, "steps")
    words = _Out(out, sum_words(rotation.rotated_elements(len(x)), width), np.int32)
    own_checks = _Out(checks, tiles(len(x)), np.int32)
    call(
        "encode_rotated_sum", address(x), kind, len(x), address(steps), width, _words(signs), _words(key), start,
        address(words.array), address(own_checks.array),
    )  # fmt: skip
    return words.done(), own_checks.done()


def rotated_sum_checks(words: np.ndarray, width: int, elements: int) -> np.ndarray:
    coordinates = rotation.rotated_elements(elements)
    words = _sum_words(words, coordinates, width)
    checks = np.empty(tiles(elements), np.int32)
    call("rotated_sum_checks", address(words), width, coordinates, address(checks))
    return checks


def decode_rotated_sum(
    words: np.ndarray,
    steps: np.ndarray,
    width: int,
    signs: Key,
    factor: float,
    out: np.ndarray,
    start: int = 0,
) -> np.ndarray:
    rotated_sums.check_steps(len(steps), len(out))
    words = _sum_words(words, rotation.rotated_elements(len(out)), width)
    steps = _input(steps, np.float32, "steps")
    arguments = (len(out), width, factor, _words(signs), start)
    return _decode("decode_rotated_sum", address(words), address(steps), arguments, out)


# ---- packing -----------------------------------------------------------------------------------------------------


def codes_of_digits(digits: np.ndarray, bits: int) -> np.ndarray:
    _check_range("bits", bits, 2, 16)
    digits = _input(digits, np.int32, "digits")
    codes = np.empty(len(digits), np.uint32)
    call("codes_of_digits", address(digits), len(digits), bits, address(codes))
    return codes


def pack_sum(digits: np.ndarray, width: int, out: np.ndarray | None = None) -> np.ndarray:
    _check_range("width", width, 1, 16)
    digits = _input(digits, np.int32, "digits")
    result = _Out(out, sum_words(len(digits), width), np.int32)
    call("pack_sum", address(digits), len(digits), width, address(result.array))
    return result.done()


def unpack_sum(words: np.ndarray, width: int, elements: int) -> np.ndarray:
    words = _sum_words(words, elements, width)
    digits = np.empty(elements, np.int32)
    call("unpack_sum", address(words), elements, width, address(digits))
    return digits


def pack_codes(
    codes: np.ndarray, bits: int, out: np.ndarray | None = None, whole_tiles: bool = False
) -> np.ndarray:
    _check_range("bits", bits, 1, 16)
    codes = _input(codes, np.uint32, "codes")
    used = code_words(len(codes), bits)
    result = _Out(out, tiles(len(codes)) * bits * ROW if whole_tiles else used, np.int32)
    call("pack_codes", address(codes), len(codes), bits, address(result.array))
    result.array[used:] = 0
    return result.done()


def unpack_codes(words: np.ndarray, bits: int, elements: int) -> np.ndarray:
    _check_range("bits", bits, 1, 16)
    words = _code_words(words, elements, bits)
    codes = np.empty(elements, np.uint32)
    call("unpack_codes", address(words), elements, bits, address(codes))
    return codes


# ---- Elias coding ------------------------------------------------------------------------------------------------
# What is wrong with a payload, a count or a code's name is said by `reference`, which is then run on it.


def elias_encode_codes(
    words: np.ndarray, bits: int, elements: int, code: str = "gamma", limit: int | None = None
) -> np.ndarray | None:
    _check_range("bits", bits, 2, 16)
    words = _code_words(words, elements, bits)
    if not _fits_elias(elements, code):
        return reference.elias_encode_codes(words, bits, elements, code, limit)
    omega = code == "omega"
    sizes = np.empty(2, np.int64)
    call("elias_measure", address(words), elements, bits, omega, address(sizes))
    sparse, dense = sizes.tolist()
    use_dense = dense < sparse and elements > 0
    size = ((dense if use_dense else sparse) + 7) // 8
    if limit is not None and size >= limit:
        return None
    stream = np.empty(size + 8, np.uint8)  # 8 bytes more, for whole-word stores
    call("elias_encode_codes", address(words), elements, bits, omega, use_dense, address(stream))
    return stream[:size]


def elias_decode_codes(
    payload: np.ndarray, elements: int, bits: int, code: str = "gamma", out: np.ndarray | None = None
) -> np.ndarray:
    _check_range("bits", bits, 2, 16)
    words = _try_elias_decode_codes(payload, elements, bits, code, out)
    return reference.elias_decode_codes(payload, elements, bits, code, out) if words is None else words


def _try_elias_decode_codes(payload, elements, bits, code, out=None) -> np.ndarray | None:
    """The packed codes; None where `reference` finds something wrong."""
    if (
        not isinstance(payload, np.ndarray)
        or payload.dtype != np.uint8
        or payload.ndim != 1
        or not payload.size
        or not _fits_elias(elements, code)
    ):
        return None
    if payload[0] & 1 and elements >= 8 * payload.size:  # dense, where every element takes at least a bit
        return None
    payload = _flat(payload, "payload")
    words = _Out(out, code_words(elements, bits), np.int32)
    arguments = (elements, bits, code == "omega", address(words.array))
    if not call("elias_decode_codes", address(payload), len(payload), *arguments):
        return None
    return words.done()


def _fits_elias(elements: int, code: str) -> bool:
    return isinstance(elements, int) and 0 <= elements <= entropy.MAX_COUNT and code in ("gamma", "omega")
