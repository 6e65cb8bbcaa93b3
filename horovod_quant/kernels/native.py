"""Kernels in C++ (native.cpp): the functions that `reference` defines, with bit-identical results.

Arrays are checked here, so that no call exceeds their bounds; arrays that are not contiguous or not aligned are copied.
A call releases Python's global lock. `native_library` loads the library.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from horovod_quant.kernels import entropy, reference, rotated_sums, rotation, sums
from horovod_quant.kernels.arrays import (  # noqa: F401 (part of every backend)
    TILES_AT_A_TIME,
    address,
    concatenate,
    empty,
    key_of_word,
    pack,
    pack_flags,
    step_word,
    unpack_flags,
    view,
    with_nan_tiles,
)
from horovod_quant.kernels.checks import MAX_LEVELS, check_bucket_size, check_pairs, check_range, check_votes
from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import ROW, TILE, buckets, code_words, sum_words, tiles
from horovod_quant.kernels.native_arguments import (
    KEY,
    checked_code_words,
    checked_norms,
    checked_sum_words,
    flat,
    out_array,
    pointers,
    type_of,
    validated,
    words_of,
    write_back,
)
from horovod_quant.kernels.native_library import call
from horovod_quant.kernels.native_segments import NativeSegments
from horovod_quant.kernels.reference import (  # noqa: F401 (part of every backend)
    add_exponential,
    codes_of_digits,
    decoding_scales,
    exponential_values,
    less,
    mean,
    minimum,
    next_powers_of_two,
    norms_of_square_sums,
    pack_codes,
    pack_sum,
    round_uniform,
    scale,
    to_float16,
    to_float32,
    unpack_codes,
    unpack_sum,
    where,
)

NAME = "native"

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
    kind = type_of(x, "x")
    x = flat(x, "x")
    check_bucket_size(bucket_size)
    result = out_array(out, buckets(len(x), bucket_size), dtype)
    call(kernel, address(x), kind, len(x), bucket_size, address(result))
    return write_back(result, out)


def clip(x: np.ndarray, most: float) -> np.ndarray:
    return sums.clip(sys.modules[__name__], x, most)


# ---- uniform levels ----------------------------------------------------------------------------------------------


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
    check_range("levels", levels, 1, MAX_LEVELS)
    check_range("width", width, 1, 16)
    arguments = (levels, words_of(key), start, width)
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
    check_range("bits", bits, 2, 16)
    arguments = (words_of(key), start, bits)
    return _encode("encode_uniform_codes", x, norms, bucket_size, arguments, code_words(len(x), bits), out)


def _encode(kernel, x, norms, bucket_size, arguments, length, out):
    kind = type_of(x, "x")
    x = flat(x, "x")
    norms = checked_norms(norms, len(x), bucket_size)
    result = out_array(out, length, np.int32)
    call(kernel, address(x), kind, len(x), address(norms), bucket_size, *arguments, address(result))
    return write_back(result, out)


def decode_uniform_sum(
    words: np.ndarray,
    norms: np.ndarray,
    bucket_size: int,
    levels: int,
    width: int,
    factor: float,
    out: np.ndarray,
) -> np.ndarray:
    check_range("levels", levels, 1, MAX_LEVELS)
    words = checked_sum_words(words, len(out), width)
    norms = checked_norms(norms, len(out), bucket_size)
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
    check_range("bits", bits, 2, 16)
    return _decode_workers("decode_uniform_codes", words, norms, bucket_size, bits, factor, out)


def _decode_workers(kernel, words, norms, bucket_size, bits, factor, out):
    check_pairs(words, norms)
    words = [checked_code_words(one, len(out), bits) for one in words]
    norms = [checked_norms(one, len(out), bucket_size) for one in norms]
    units = np.empty(16 * len(words), np.float32)
    arguments = (len(words), len(out), bucket_size, bits, factor, address(units))
    return _decode(kernel, pointers(words), pointers(norms), arguments, out)


def _decode(kernel, words, norms, arguments, out):
    kind = type_of(out, "out")
    result = out_array(out, len(out), out.dtype)
    call(kernel, words, norms, *arguments, address(result), kind)
    return write_back(result, out)


# ---- exponential levels ------------------------------------------------------------------------------------------


def round_exponential(
    x: np.ndarray, norms: np.ndarray, bucket_size: int, bits: int, key: Key, start: int = 0
) -> np.ndarray:
    check_range("bits", bits, 2, 8)
    return _encode("round_exponential", x, norms, bucket_size, (words_of(key), start, bits), len(x), None)


def encode_exponential(
    x: np.ndarray,
    norms: np.ndarray,
    bucket_size: int,
    bits: int,
    key: Key,
    start: int = 0,
    out: np.ndarray | None = None,
) -> np.ndarray:
    check_range("bits", bits, 2, 8)
    arguments = (words_of(key), start, bits)
    return _encode("encode_exponential", x, norms, bucket_size, arguments, code_words(len(x), bits), out)


def decode_exponential(
    words: Sequence[np.ndarray],
    norms: Sequence[np.ndarray],
    bucket_size: int,
    bits: int,
    factor: float,
    out: np.ndarray,
) -> np.ndarray:
    check_range("bits", bits, 2, 8)
    return _decode_workers("decode_exponential", words, norms, bucket_size, bits, factor, out)


# ---- one bit -----------------------------------------------------------------------------------------------------


def binarize(
    gradient: np.ndarray,
    momentum: np.ndarray,
    scale: np.ndarray,  # noqa: F811 (not the kernel)
    beta: float,
    key: Key,
    start: int = 0,
    out: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    kind = type_of(gradient, "gradient")
    gradient = flat(gradient, "gradient")
    count = len(gradient)
    m, b = out_array(momentum, count, np.float32), out_array(scale, count, np.float32)
    words = out_array(out, tiles(count) * ROW, np.int32)
    broken = np.empty(tiles(count), bool)
    call(
        "binarize", address(gradient), kind, count, address(m), address(b), beta, 1.0 - beta,
        words_of(key), start, address(words), address(broken),
    )  # fmt: skip
    write_back(m, momentum)
    write_back(b, scale)
    return write_back(words, out), broken


def vote(words: Sequence[np.ndarray], key: Key, start: int = 0, out: np.ndarray | None = None) -> np.ndarray:
    check_votes(words)
    words = [validated(one, np.int32, "words") for one in words]
    result = out_array(out, len(words[0]), np.int32)
    call("vote", pointers(words), len(words), len(words[0]) // ROW, words_of(key), start, address(result))
    return write_back(result, out)


def decode_signs(words: np.ndarray, magnitude: float, out: np.ndarray) -> np.ndarray:
    kind = type_of(out, "out")
    words = checked_code_words(words, len(out), 1)
    result = out_array(out, len(out), out.dtype)
    call("decode_signs", address(words), len(out), magnitude, address(result), kind)
    return write_back(result, out)


# ---- rotation ----------------------------------------------------------------------------------------------------


def encode_rotated(
    x: np.ndarray,
    bits: int,
    key: Key,
    start: int = 0,
    out: np.ndarray | None = None,
    scales: np.ndarray | None = None,
    trellis: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    check_range("bits", bits, 1, 4)
    kind = type_of(x, "x")
    x = flat(x, "x")
    words = out_array(out, rotation.rotated_words(len(x), bits), np.int32)
    local_scales = out_array(scales, tiles(len(x)), np.float32)
    call(
        "encode_rotated", address(x), kind, len(x), bits, trellis, words_of(key), start, address(words),
        address(local_scales),
    )  # fmt: skip
    return write_back(words, out), write_back(local_scales, scales)


def decode_rotated(
    words: np.ndarray,
    scales: np.ndarray,
    bits: int,
    key: Key,
    factor: float,
    out: np.ndarray,
    start: int = 0,
    trellis: bool = False,
) -> np.ndarray:
    return add_rotated([words], [scales], bits, [key], factor, out, start, trellis)


def add_rotated(
    words: Sequence[np.ndarray],
    scales: Sequence[np.ndarray],
    bits: int,
    keys: Sequence[Key],
    factor: float,
    out: np.ndarray,
    start: int = 0,
    trellis: bool = False,
) -> np.ndarray:
    check_range("bits", bits, 1, 4)
    rotation.check_workers(words, scales, keys)
    for one in scales:
        rotation.check_scales(len(one), len(out))
    words = [checked_code_words(one, rotation.rotated_elements(len(out)), bits) for one in words]
    scales = [validated(one, np.float32, "scales") for one in scales]
    signs = (KEY * len(keys))(*map(words_of, keys))
    arguments = (len(words), len(out), bits, trellis, factor, signs, start)
    return _decode("add_rotated", pointers(words), pointers(scales), arguments, out)


def rotated_samples(
    x: np.ndarray, samples: int, key: Key, start: int = 0, out: np.ndarray | None = None
) -> np.ndarray:
    check_range("samples", samples, 1, TILE)
    kind = type_of(x, "x")
    x = flat(x, "x")
    result = out_array(out, tiles(len(x)) * samples, np.float32)
    call("rotated_samples", address(x), kind, len(x), samples, words_of(key), start, address(result))
    return write_back(result, out)


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
    check_range("width", width, 1, 16)
    rotated_sums.check_steps(len(steps), len(x))
    kind = type_of(x, "x")
    x = flat(x, "x")
    steps = validated(steps, np.float32, "steps")
    words = out_array(out, sum_words(rotation.rotated_elements(len(x)), width), np.int32)
    local_checks = out_array(checks, tiles(len(x)), np.int32)
    call(
        "encode_rotated_sum", address(x), kind, len(x), address(steps), width, words_of(signs), words_of(key), start,
        address(words), address(local_checks),
    )  # fmt: skip
    return write_back(words, out), write_back(local_checks, checks)


def rotated_sum_checks(words: np.ndarray, width: int, elements: int) -> np.ndarray:
    coordinates = rotation.rotated_elements(elements)
    words = checked_sum_words(words, coordinates, width)
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
    words = checked_sum_words(words, rotation.rotated_elements(len(out)), width)
    steps = validated(steps, np.float32, "steps")
    arguments = (len(out), width, factor, words_of(signs), start)
    return _decode("decode_rotated_sum", address(words), address(steps), arguments, out)


# ---- Elias coding ------------------------------------------------------------------------------------------------
# Errors in a payload are raised by `reference`, which then runs on the same arguments.


def elias_encode_codes(
    words: np.ndarray, bits: int, elements: int, code: str = "gamma", limit: int | None = None
) -> np.ndarray | None:
    check_range("bits", bits, 2, 16)
    words = checked_code_words(words, elements, bits)
    omega = _is_omega(elements, code)
    sizes = np.empty(2, np.int64)
    call("elias_measure", address(words), elements, bits, omega, address(sizes))
    sparse, dense = sizes.tolist()
    use_dense = dense < sparse and elements > 0
    size = ((dense if use_dense else sparse) + 7) // 8
    if limit is not None and size >= limit:
        return None
    stream = np.empty(size + 8, np.uint8)  # 8 spare bytes for whole-word stores
    call("elias_encode_codes", address(words), elements, bits, omega, use_dense, address(stream))
    return stream[:size]


def elias_decode_codes(
    payload: np.ndarray, elements: int, bits: int, code: str = "gamma", out: np.ndarray | None = None
) -> np.ndarray:
    check_range("bits", bits, 2, 16)
    words = _try_elias_decode_codes(payload, elements, bits, code, out)
    return reference.elias_decode_codes(payload, elements, bits, code, out) if words is None else words


def _try_elias_decode_codes(payload, elements, bits, code, out=None) -> np.ndarray | None:
    """Return the packed codes; None for an invalid payload."""
    payload, omega = validated(payload, np.uint8, "payload"), _is_omega(elements, code)
    if not payload.size:
        return None
    if payload[0] & 1 and elements >= 8 * payload.size:  # dense, where every element takes at least a bit
        return None
    words = out_array(out, code_words(elements, bits), np.int32)
    arguments = (elements, bits, omega, address(words))
    if not call("elias_decode_codes", address(payload), len(payload), *arguments):
        return None
    return write_back(words, out)


def _is_omega(elements: int, code: str) -> bool:
    check_range("elements", elements, 0, entropy.MAX_COUNT)
    return entropy.elias_of(code).name == "omega"


segments = NativeSegments(sys.modules[__name__])
