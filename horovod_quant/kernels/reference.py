"""Kernels in numpy: the specification of every bit that horovod-quant computes.

Pure functions on flat arrays. Gradients are read from, and decoded to, float32, float16, float64 or bfloat16 (as
uint16) arrays; the arithmetic is in float32. ``start`` is the index in its tensor of an array's first element (a
multiple of the bucket size, or of a tile); it selects the random bits. Results are written to ``out`` where it is
given, so that the tensors of a group share one buffer.

Arithmetic rules by which other backends are bit-identical: float32 with one rounding per operation and no fused
multiply-add; random decisions in integers; sums of squares in float64, where each square is exact, in a fixed order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Callable, Union

import numpy as np

from horovod_quant.kernels import checks, entropy, sums
from horovod_quant.kernels.arrays import (  # noqa: F401 (part of every backend)
    TILES_AT_A_TIME,
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
from horovod_quant.kernels.keys import Key, hash32
from horovod_quant.kernels.layout import ROW, TILE, buckets, code_words, filled_bucket_size, tiles

NAME = "numpy"

MIN_NORM = np.float32(2.0**-96)
"""Norms below this count as zero: ``levels * 2^k / norm`` would leave the range of float32."""

_ABS = np.uint32(0x7FFFFFFF)
_INF_BITS = np.uint32(0x7F800000)
_ONE_BITS = np.uint32(0x3F800000)


def _padded(x: np.ndarray, multiple: int) -> np.ndarray:
    missing = -len(x) % multiple
    return np.concatenate([x, np.zeros(missing, x.dtype)]) if missing else x


def _store(result: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    if out is None:
        return result
    out[...] = result
    return out


def as_float32(x: np.ndarray) -> np.ndarray:
    """Convert to float32, rounded to nearest even.

    Uint16 has the bits of bfloat16, which numpy lacks.
    """
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(np.float32, copy=False)


def store_float32(values: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write float32 values to an array of a gradient's dtype.

    float16, float32, float64 or bfloat16 (as uint16), rounded to nearest even.
    """
    if out.dtype == np.uint16:
        bits = values.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
        out[...] = np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    else:
        with np.errstate(over="ignore"):
            out[...] = values
    return out


def per_element(per_bucket: np.ndarray, bucket_size: int, elements: int) -> np.ndarray:
    """Repeat the value of each bucket for its elements."""
    checks.check_norms(len(per_bucket), elements, bucket_size)
    needed = buckets(elements, bucket_size)
    return np.repeat(per_bucket[:needed], min(bucket_size, elements))[:elements]


# ---- norms -------------------------------------------------------------------------------------------------------


def bucket_maxima(x: np.ndarray, bucket_size: int, out: np.ndarray | None = None) -> np.ndarray:
    """Return the largest magnitude of each bucket, float32.

    Inf for a bucket with a NaN or an infinity. NaN becomes inf because a Max over workers may lose a NaN.
    """
    size = filled_bucket_size(len(x), bucket_size)
    magnitudes = _padded(as_float32(x).view(np.uint32) & _ABS, size).reshape(-1, size)
    largest = magnitudes.max(axis=1, initial=0)
    return _store(np.minimum(largest, _INF_BITS).view(np.float32), out)


def bucket_square_sums(x: np.ndarray, bucket_size: int, out: np.ndarray | None = None) -> np.ndarray:
    """Return the sum of squares of each bucket, float64.

    Inf for a bucket with a NaN or an infinity. Added row by row into 32 lanes, then by a tree over the lanes. The
    result is rounded to 24 significant bits: this makes the sum over workers exact, hence the same in any order of
    addition, unless their norms differ by a factor of thousands.
    """
    return _bucket_sums(x, bucket_size, out, lambda values: values * values)


def bucket_sums(x: np.ndarray, bucket_size: int, out: np.ndarray | None = None) -> np.ndarray:
    """Return the sum of each bucket, float64, never -0.

    It is added and rounded as in `bucket_square_sums`.
    """
    return _bucket_sums(x, bucket_size, out, lambda values: values)


def bucket_magnitude_sums(x: np.ndarray, bucket_size: int, out: np.ndarray | None = None) -> np.ndarray:
    """Return the sum of magnitudes of each bucket, float64.

    It is added and rounded as in `bucket_square_sums`.
    """
    return _bucket_sums(x, bucket_size, out, np.abs)


def _bucket_sums(
    x: np.ndarray, bucket_size: int, out: np.ndarray | None, term: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    size = filled_bucket_size(len(x), bucket_size)
    grid = _padded(as_float32(x), size).reshape(-1, size // ROW, ROW)
    lanes = np.zeros((grid.shape[0], ROW), np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for row in range(grid.shape[1]):
            lanes += term(grid[:, row, :].astype(np.float64))
        total = _lanes_in_a_tree(lanes)
    return _store(sums.to_24_bits(total), out)


def _lanes_in_a_tree(lanes: np.ndarray) -> np.ndarray:
    """Return the sum of each row of 32 lanes."""
    half = ROW // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    return lanes[:, 0]


def norms_of_square_sums(square_sums: np.ndarray) -> np.ndarray:
    """Return float32 square roots of float64 sums.

    Inf where the root leaves the range of float32.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.sqrt(square_sums).astype(np.float32)


def inverse_norms(norms: np.ndarray, numerator: float) -> np.ndarray:
    """Return ``numerator / norm`` in float32.

    It is 0 for a norm that counts as zero or is not finite.
    """
    usable = (norms >= MIN_NORM) & (norms < np.inf)
    return np.where(usable, np.float32(numerator) / np.where(usable, norms, np.float32(1)), np.float32(0))


def decoding_scales(norms: np.ndarray, levels: int, factor: float) -> np.ndarray:
    """Return the value of one level in each bucket, times ``factor``.

    NaN where the norm is not finite.
    """
    scales = norms / np.float32(levels) * np.float32(factor)
    return np.where(norms < np.inf, scales, np.float32(np.nan))


# ---- uniform levels ----------------------------------------------------------------------------------------------


def fraction_bits(levels: int) -> int:
    """Return the number of random bits of a rounding, at most 24.

    With k bits ``levels * 2^k + 2^k`` is within int32.
    """
    return min(24, 31 - levels.bit_length())


def round_uniform(
    x: np.ndarray, norms: np.ndarray, bucket_size: int, levels: int, key: Key, start: int = 0
) -> np.ndarray:
    """Round ``levels * x / norm`` stochastically to int32 in ``[-levels, levels]``.

    With k = fraction_bits(levels): ``y = x * (levels 2^k / norm)``, clamped to ``+-levels 2^k``, is truncated to an
    integer, k random bits are added and shifted out: the arithmetic shift rounds down, and the random bits carry
    into the result with the probability of the fraction. With u in [0, 1) for the bits that is ``floor(y + u)``,
    for elements of either sign, as correlated dithers require.
    """
    k = fraction_bits(levels)
    limit = np.float32(levels << k)
    inverse = inverse_norms(norms, levels << k)
    with np.errstate(invalid="ignore", over="ignore"):
        y = as_float32(x) * per_element(inverse, bucket_size, len(x))
        # NaN fails the comparison and becomes the limit: its bucket's norm is inf, it decodes to NaN.
        y = np.where(y < limit, y, limit)
        y = np.where(y > -limit, y, -limit)
    random = (hash32(start, len(x), key) >> np.uint32(32 - k)).astype(np.int32)
    return (y.astype(np.int32) + random) >> np.int32(k)


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
    """Round to uniform levels, packed as digits for an allreduce."""
    return pack_sum(round_uniform(x, norms, bucket_size, levels, key, start), width, out)


def decode_uniform_sum(
    words: np.ndarray,
    norms: np.ndarray,
    bucket_size: int,
    levels: int,
    width: int,
    factor: float,
    out: np.ndarray,
) -> np.ndarray:
    """Write ``digit * (norm / levels * factor)`` to ``out``."""
    digits = unpack_sum(words, width, len(out))
    scales = per_element(decoding_scales(norms, levels, factor), bucket_size, len(out))
    return store_float32(digits.astype(np.float32) * scales, out)


def encode_uniform_codes(
    x: np.ndarray,
    norms: np.ndarray,
    bucket_size: int,
    bits: int,
    key: Key,
    start: int = 0,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Round to ``2^(bits-1) - 1`` uniform levels, and pack sign-and-magnitude codes."""
    digits = round_uniform(x, norms, bucket_size, uniform_levels(bits), key, start)
    return pack_codes(codes_of_digits(digits, bits), bits, out)


def decode_uniform_codes(
    words: Sequence[np.ndarray],
    norms: Sequence[np.ndarray],
    bucket_size: int,
    bits: int,
    factor: float,
    out: np.ndarray,
) -> np.ndarray:
    """Write the sum of the workers' decoded codes.

    Each is decoded with that worker's norms, and added in rank order.
    """
    return _add_workers(
        words, norms, bucket_size, bits, out,
        value=lambda digits: digits.astype(np.float32),
        scale=lambda worker_norms: decoding_scales(worker_norms, uniform_levels(bits), factor),
    )  # fmt: skip


def uniform_levels(bits: int) -> int:
    """Return the number of levels of a code.

    1 for 2 bits, 7 for 4, 127 for 8.
    """
    return (1 << (bits - 1)) - 1


# ---- exponential levels ------------------------------------------------------------------------------------------


def round_exponential(
    x: np.ndarray, norms: np.ndarray, bucket_size: int, bits: int, key: Key, start: int = 0
) -> np.ndarray:
    """Round ``x / norm`` stochastically to signed level indices, int32.

    With ``top = 2^(bits-1) - 1``, index k >= 1 represents ``2^(k - top)`` and 0 represents 0. A float's mantissa is
    linear between powers of two, so random bits added to it carry into the exponent with the right probability; below
    the smallest level the rounding is that of a uniform level.

    The magnitude is rounded. Where the key has ``mirror``, it flips the bits of negative elements: 1 - u rounds the
    magnitude up where u rounds the element down. The bits do not affect values that lie on a level, such as zeros of
    either sign, or NaN, which becomes the largest level.
    """
    top = uniform_levels(bits)
    inverse = inverse_norms(norms, 1.0)
    with np.errstate(invalid="ignore", over="ignore"):
        y = as_float32(x) * per_element(inverse, bucket_size, len(x))
    y_bits = y.view(np.uint32)
    magnitude = np.minimum(y_bits & _ABS, _ONE_BITS)
    h = hash32(start, len(x), key)
    h = np.where(y_bits > _ABS, h ^ np.uint32(key.mirror), h)
    index = ((magnitude + (h >> np.uint32(9))) >> np.uint32(23)).astype(np.int32) - np.int32(127 - top)
    # At 8 bits the smallest level is the smallest normal float, and subnormals are linear anyway.
    if top < 127:
        smallest = np.float32(2.0 ** (1 - top))
        value = np.minimum(magnitude.view(np.float32), smallest)
        truncated = (value * np.float32(2.0 ** (top - 1 + 24))).astype(np.int32)
        below = (truncated + (h >> np.uint32(8)).astype(np.int32)) >> np.int32(24)
        index = np.where(magnitude.view(np.float32) < smallest, below, index)
    return np.where(y_bits > _ABS, -index, index)


def encode_exponential(
    x: np.ndarray,
    norms: np.ndarray,
    bucket_size: int,
    bits: int,
    key: Key,
    start: int = 0,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Round to exponential levels, and pack sign-and-index codes."""
    digits = round_exponential(x, norms, bucket_size, bits, key, start)
    return pack_codes(codes_of_digits(digits, bits), bits, out)


def exponential_values(digits: np.ndarray, bits: int) -> np.ndarray:
    """Return ``sign * 2^(|digit| - top)``, 0 for digit 0, float32."""
    index = np.abs(digits).astype(np.uint32)
    exponent = np.where(index > 0, index + np.uint32(127 - uniform_levels(bits)), np.uint32(0))
    sign = (digits < 0).astype(np.uint32) << np.uint32(31)
    return ((exponent << np.uint32(23)) | sign).view(np.float32)


def decode_exponential(
    words: Sequence[np.ndarray],
    norms: Sequence[np.ndarray],
    bucket_size: int,
    bits: int,
    factor: float,
    out: np.ndarray,
) -> np.ndarray:
    """Write the sum of the workers' decoded codes.

    Each is decoded with that worker's norms, and added in rank order.
    """
    return _add_workers(
        words, norms, bucket_size, bits, out,
        value=lambda digits: exponential_values(digits, bits),
        scale=lambda worker_norms: decoding_scales(worker_norms, 1, factor),
    )  # fmt: skip


def _add_workers(words, norms, bucket_size, bits, out, value, scale):
    checks.check_pairs(words, norms)
    total = np.zeros(0, np.float32)
    for worker, (worker_words, worker_norms) in enumerate(zip(words, norms)):
        digits = digits_of_codes(unpack_codes(worker_words, bits, len(out)), bits)
        scales = per_element(scale(worker_norms), bucket_size, len(out))
        total = value(digits) * scales if worker == 0 else total + value(digits) * scales
    return store_float32(total, out)


def add_exponential(a: np.ndarray, b: np.ndarray, key: Key) -> np.ndarray:
    """Add signed level indices, and round the sum to a level.

    The reduction of Global-QSGD's exponential dithering. Index k represents ``2^(k-1)`` in units of the smallest
    level. Equal magnitudes double or cancel; otherwise the larger magnitude ``2^i`` and the smaller ``2^j`` give
    with the same signs ``2^(i+1)`` with probability ``2^(j-i)``, else ``2^i``; with opposite signs ``2^(i-1)``
    with probability ``2^(j-i+1)``, else ``2^i``. A probability below 2^-32 counts as zero.

    Args:
        a: int32 level indices.
        b: the other summand, same shape.
        key: selects the random bits.
    """
    swap = np.abs(b) > np.abs(a)
    large, small = np.where(swap, b, a), np.where(swap, a, b)
    sign = np.where(large < 0, -1, 1).astype(np.int32)
    high, low = np.abs(large), np.abs(small)
    gap = high - low
    opposite = (large < 0) != (small < 0)
    halvings = np.clip(gap - opposite, 0, 63).astype(np.uint64)
    moves = hash32(0, len(a), key).astype(np.uint64) < (np.uint64(1 << 32) >> halvings)
    moved = np.where(opposite, np.where(gap == 0, 0, high - 1), high + 1)
    return sign * np.where((low > 0) & moves, moved, high).astype(np.int32)


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
    """Update momentum and scale, and draw one bit per element.

    Source: BinSGDM, section 3. The state is updated in place: ``momentum = beta * momentum + (1 - beta) * g`` and
    ``scale = beta * scale + (1 - beta) * |g|``; the bit is 1 with probability ``(1 + momentum / scale) / 2``, or 1/2
    where the scale is zero or subnormal. A tile of 1,024 elements with a non-finite gradient leaves both unchanged and
    is reported.

    Returns:
        The packed bits (int32 words), and for each tile whether it had a non-finite gradient (bool).
    """
    gradient = as_float32(gradient)
    tile_bits = _padded(gradient.view(np.uint32) & _ABS, TILE).reshape(-1, TILE)
    nonfinite = tile_bits.max(axis=1, initial=0) >= _INF_BITS
    finite = np.repeat(~nonfinite, TILE)[: len(gradient)]
    keep, take = np.float32(beta), np.float32(1.0 - beta)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        momentum[...] = np.where(finite, keep * momentum + take * gradient, momentum)
        scale[...] = np.where(finite, keep * scale + take * np.abs(gradient), scale)
    width = np.where(scale >= np.finfo(np.float32).tiny, scale, np.float32(1))
    signed = hash32(start, len(gradient), key).view(np.int32) >> np.int32(8)
    uniform = signed.astype(np.float32) * np.float32(2.0**-23)
    bits = (uniform * width < momentum).astype(np.uint32)
    return pack_codes(bits, 1, out, whole_tiles=True), nonfinite


def vote(words: Sequence[np.ndarray], key: Key, start: int = 0, out: np.ndarray | None = None) -> np.ndarray:
    """Draw one bit from the average of n workers' signs.

    The reducer's part of a 1-bit allreduce. If c of n bits are 1, the result is 1 with probability c / n, decided as
    ``(h >> (32-k)) * n < c << k`` in uint32 with the most random bits k <= 24 that cannot overflow. The number of words
    is a multiple of 32 (whole tiles).
    """
    checks.check_votes(words)
    n = len(words)
    k = min(24, 32 - n.bit_length())
    elements = len(words[0]) * 32
    ones = np.zeros(elements, np.uint32)
    for worker_words in words:
        ones += unpack_codes(worker_words, 1, elements)
    random = hash32(start, elements, key) >> np.uint32(32 - k)
    bits = (random * np.uint32(n) < ones << np.uint32(k)).astype(np.uint32)
    return pack_codes(bits, 1, out, whole_tiles=True)


def decode_signs(words: np.ndarray, magnitude: float, out: np.ndarray) -> np.ndarray:
    """Write ``+magnitude`` for a bit that is 1 and ``-magnitude`` for 0."""
    bits = unpack_codes(words, 1, len(out))
    return store_float32(np.where(bits == 1, np.float32(magnitude), np.float32(-magnitude)), out)


# ---- arithmetic for schemes --------------------------------------------------------------------------------------
# An operand is a floating-point array, read as float32, or a number, rounded to float32. An array of one element is
# broadcast.

Operand = Union[np.ndarray, float]


def tensor_maximum(x: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of all elements: see `horovod_quant.kernels.sums`."""
    return sums.tensor_maximum(sys.modules[__name__], x)


def tensor_mean_magnitude(x: np.ndarray) -> np.ndarray:
    """Return the mean magnitude of all elements: see `horovod_quant.kernels.sums`."""
    return sums.tensor_mean_magnitude(sys.modules[__name__], x)


def tensor_deviation(x: np.ndarray) -> np.ndarray:
    """Return the standard deviation of all elements: see `horovod_quant.kernels.sums`."""
    return sums.tensor_deviation(sys.modules[__name__], x)


def less(a: np.ndarray, b: Operand) -> np.ndarray:
    """Return ``a < b`` for each element, bool.

    False if either is NaN, and -0 is not less than 0.
    """
    with np.errstate(invalid="ignore"):
        return as_float32(a) < _operand(b, len(a))


def where(flags: np.ndarray, a: Operand, b: Operand) -> np.ndarray:
    """Return ``a`` where the flag is set, else ``b``, float32."""
    chosen, other = _operand(a, len(flags)), _operand(b, len(flags))
    if not len(chosen) == len(other) == 1:
        return np.where(flags, chosen, other)
    # np.where branches for each element, which is 10× slower where the flags are those of random signs.
    bits = flags.astype(np.uint32)
    bits *= chosen.view(np.uint32) ^ other.view(np.uint32)
    bits ^= other.view(np.uint32)
    return bits.view(np.float32)


def minimum(a: np.ndarray, b: Operand) -> np.ndarray:
    """Return ``b`` where ``b < a``, else ``a``, float32.

    So NaN stays in ``a`` and is ignored in ``b``; 0 and -0 are equal.
    """
    values, most = as_float32(a), _operand(b, len(a))
    with np.errstate(invalid="ignore"):
        return np.where(most < values, most, values)


def next_powers_of_two(norms: np.ndarray) -> np.ndarray:
    """Round magnitudes up to powers of two, of at least 2^-126, float32.

    Returns 0 for 0, and inf for magnitudes that are not finite or exceed 2^127.
    """
    magnitudes = np.minimum(as_float32(norms).view(np.uint32) & _ABS, _INF_BITS)
    return ((magnitudes + np.uint32(0x007FFFFF)) & _INF_BITS).view(np.float32)


def _operand(values: Operand, elements: int) -> np.ndarray:
    if not isinstance(values, np.ndarray):
        with np.errstate(over="ignore"):
            return np.full(1, values, np.float32)
    check_operand(len(values), elements)
    return as_float32(values)


def check_operand(length: int, elements: int) -> None:
    """Raise ValueError unless an array has one or ``elements`` elements."""
    if length not in (1, elements):
        raise ValueError(f"an array of {length} elements beside one of {elements}; use {elements}, or one")


# ---- among the workers of a node ---------------------------------------------------------------------------------


def to_float32(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Convert to float32, in new memory or ``out``, as `as_float32`."""
    return store_float32(as_float32(x), np.empty(len(x), np.float32) if out is None else out)


def to_float16(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Convert to float16 by `as_float32` and rounding to nearest even.

    Infinity from 65,520 on.
    """
    return store_float32(as_float32(x), np.empty(len(x), np.float16) if out is None else out)


def mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean of float32 arrays.

    It is their sum, in order, times the rounded inverse of their number.
    """
    if len({len(array) for array in arrays}) > 1:
        raise ValueError(f"arrays of lengths {[len(array) for array in arrays]}; they must be the same")
    total = np.empty_like(arrays[0])
    inverse = np.float32(1.0 / len(arrays))
    at_a_time = TILES_AT_A_TIME * TILE
    with np.errstate(over="ignore", invalid="ignore"):
        for low in range(0, len(total), at_a_time):
            part = slice(low, low + at_a_time)
            total[part] = arrays[0][part]
            for array in arrays[1:]:
                total[part] += array[part]
            total[part] *= inverse
    return total


def clip(x: np.ndarray, most: float) -> np.ndarray:
    """Clip a gradient to an L2 norm: see `horovod_quant.kernels.sums`."""
    return sums.clip(sys.modules[__name__], x, most)


def scale(pieces: Sequence[np.ndarray], factor: float, out: np.ndarray) -> np.ndarray:
    """Write concatenated float32 ``pieces`` times ``factor`` to a floating-point array."""
    if sum(map(len, pieces)) != len(out):
        raise ValueError(f"pieces of lengths {[len(piece) for piece in pieces]} for {len(out)} elements")
    low = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for piece in pieces:
            part = out[low : low + len(piece)]
            if part.dtype == np.float32:
                np.multiply(piece, np.float32(factor), out=part)
            else:
                store_float32(piece * np.float32(factor), part)
            low += len(piece)
    return out


# ---- packing -----------------------------------------------------------------------------------------------------


def codes_of_digits(digits: np.ndarray, bits: int) -> np.ndarray:
    """Return sign-and-magnitude codes, uint32: the sign is the highest of ``bits`` bits."""
    return np.abs(digits).astype(np.uint32) | ((digits < 0).astype(np.uint32) << np.uint32(bits - 1))


def digits_of_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    magnitude = (codes & np.uint32((1 << (bits - 1)) - 1)).astype(np.int32)
    return np.where(codes >> np.uint32(bits - 1), -magnitude, magnitude)


def pack_sum(digits: np.ndarray, width: int, out: np.ndarray | None = None) -> np.ndarray:
    """Pack signed digits as fields of int32 words.

    ``word[t, g] = sum_i digit[t, i, g] * 2^(width i)`` modulo 2^32. Adding words adds all
    fields at once as long as each sum stays within ``+-(2^(width-1) - 1)``.
    """
    fields = 32 // width
    grid = _padded(digits.astype(np.int32, copy=False), ROW * fields).view(np.uint32).reshape(-1, fields, ROW)
    words = np.zeros((grid.shape[0], ROW), np.uint32)
    for field in range(fields):
        words += grid[:, field, :] << np.uint32(width * field)
    return _store(words.reshape(-1).view(np.int32), out)


def unpack_sum(words: np.ndarray, width: int, elements: int) -> np.ndarray:
    """Unpack the fields of ``pack_sum``, int32.

    A bias of ``2^(width-1)`` in each field undoes the borrows.
    """
    checks.check_sum_words(len(words), elements, width)
    fields = 32 // width
    bias = sum(1 << (width * field + width - 1) for field in range(fields))
    biased = words.view(np.uint32).reshape(-1, ROW) + np.uint32(bias)
    digits = np.empty((len(biased), fields, ROW), np.int32)
    for field in range(fields):
        unsigned = (biased >> np.uint32(width * field)) & np.uint32((1 << width) - 1)
        digits[:, field, :] = unsigned.astype(np.int32) - np.int32(1 << (width - 1))
    return digits.reshape(-1)[:elements]


def pack_codes(
    codes: np.ndarray, bits: int, out: np.ndarray | None = None, whole_tiles: bool = False
) -> np.ndarray:
    """Pack codes as a dense bit stream in each of 32 lanes.

    Codes are uint32 below ``2^bits``, words are int32.
    """
    grid = _padded(codes, TILE).reshape(-1, 32, ROW)
    words = np.zeros((len(grid), bits, ROW), np.uint32)
    for row in range(32):
        word, shift = divmod(row * bits, 32)
        words[:, word, :] |= grid[:, row, :] << np.uint32(shift)
        if shift + bits > 32:
            words[:, word + 1, :] |= grid[:, row, :] >> np.uint32(32 - shift)
    count = tiles(len(codes)) * bits * ROW if whole_tiles else code_words(len(codes), bits)
    return _store(words.reshape(-1)[:count].view(np.int32), out)


def unpack_codes(words: np.ndarray, bits: int, elements: int) -> np.ndarray:
    """Unpack the codes of ``pack_codes``, uint32."""
    checks.check_code_words(len(words), elements, bits)
    tile_count = tiles(elements)
    grid = _padded(words.view(np.uint32), bits * ROW)[: tile_count * bits * ROW].reshape(-1, bits, ROW)
    codes = np.empty((tile_count, 32, ROW), np.uint32)
    mask = np.uint32((1 << bits) - 1)
    for row in range(32):
        word, shift = divmod(row * bits, 32)
        value = grid[:, word, :] >> np.uint32(shift)
        if shift + bits > 32:
            value = value | (grid[:, word + 1, :] << np.uint32(32 - shift))
        codes[:, row, :] = value & mask
    return codes.reshape(-1)[:elements]


# ---- Elias coding ------------------------------------------------------------------------------------------------


def elias_encode_codes(
    words: np.ndarray, bits: int, elements: int, code: str = "gamma", limit: int | None = None
) -> np.ndarray | None:
    """Encode packed sign-and-magnitude codes by ``entropy.encode``.

    Returns None if the stream would not be shorter than ``limit`` bytes.
    """
    stream = entropy.encode(digits_of_codes(unpack_codes(words, bits, elements), bits), code)
    return stream if limit is None or len(stream) < limit else None


def elias_decode_codes(
    payload: np.ndarray, elements: int, bits: int, code: str = "gamma", out: np.ndarray | None = None
) -> np.ndarray:
    """Decode an untrusted stream to packed codes of ``bits`` bits, int32 words.

    Raises:
        CorruptPayloadError: as ``entropy.decode``; ``out`` is then undefined.
    """
    digits = entropy.decode(payload, elements, uniform_levels(bits), code)
    return pack_codes(codes_of_digits(digits, bits), bits, out)


# ---- rotation ----------------------------------------------------------------------------------------------------
# Last, because it uses the functions above.

from horovod_quant.kernels.rotated_sums import (  # noqa: E402, F401
    decode_rotated_sum,
    encode_rotated_sum,
    rotated_samples,
    rotated_sum_checks,
)
from horovod_quant.kernels.rotation import add_rotated, decode_rotated, encode_rotated  # noqa: E402, F401
