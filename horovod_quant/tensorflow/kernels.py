"""Kernels of TensorFlow operations, bit-identical to the reference.

They work in eager code, graphs of both kinds, and under XLA. They are the functions of
`horovod_quant.kernels.reference` on flat tensors of static length. Nothing is written in place: results are returned,
``out`` must be None, and a decoder's ``out`` is a ``tf.TensorSpec`` of the result.

TensorFlow's threads flush subnormal float32 numbers to zero, and XLA may contract a multiplication and an addition.
So the arithmetic is done in float64, on values called *wide*: float64 tensors with float32 numbers. There a product is
exact, and a sum, quotient or root that is then rounded to float32 equals the result of one rounding
(53 >= 2 * 24 + 2 bits). Conversions treat subnormal float32 numbers only as integers.

int32 tensors are only moved: on a GPU TensorFlow's operations on them run in host memory.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Sequence
from typing import Any, Callable, Union

import numpy as np
import tensorflow as tf

from horovod_quant.kernels import keys
from horovod_quant.kernels.checks import check_code_words, check_sum_words
from horovod_quant.kernels.keys import ALL_ONES, MULTIPLIER_1, MULTIPLIER_2, WEYL, Key
from horovod_quant.kernels.layout import ROW, TILE, WHOLE_TENSOR, code_words, filled_bucket_size, tiles
from horovod_quant.kernels.reference import MIN_NORM, check_operand, fraction_bits, uniform_levels
from horovod_quant.kernels.sums import inverse_count
from horovod_quant.tensorflow.cached_subgraph import by_rows, elementwise

NAME = "tensorflow"

TILES_AT_A_TIME = 2**31
"""More tiles than any tensor has: pieces are for caches, but operations take whole tensors."""

Number = Union[int, float, tf.Tensor]
Operand = Any
"""An operand as in `horovod_quant.kernels.reference.Operand`."""

_ABS = np.uint32(0x7FFFFFFF)
_SIGN = np.uint32(0x80000000)
_INF_BITS = np.uint32(0x7F800000)
_ONE_BITS = np.uint32(0x3F800000)
_NORMAL_BITS = np.uint32(0x00800000)
_NORMAL = 2.0**-126
_LARGEST = np.float64(np.finfo(np.float32).max)
_STEP = 2.0**-149  # distance of subnormal numbers
_STEPS_IN_ONE = 2.0**149
_DROPPED_BITS = 29
_MOST_ROWS_IN_A_CHAIN = 256
_UNSIGNED = {2: tf.uint16, 4: tf.uint32, 8: tf.uint64}


# ---- float32 numbers ---------------------------------------------------------------------------------------------


@elementwise
def _bits(x: tf.Tensor) -> tf.Tensor:
    """Return the bits of ``as_float32(x)``, uint32."""
    if x.dtype == tf.float32:
        return tf.bitcast(x, tf.uint32)
    if x.dtype == tf.bfloat16:
        return tf.bitwise.left_shift(tf.cast(tf.bitcast(x, tf.uint16), tf.uint32), np.uint32(16))
    if x.dtype == tf.float16:  # subnormal float16 numbers are normal float32 numbers
        return tf.bitcast(tf.cast(x, tf.float32), tf.uint32)
    if x.dtype == tf.float64:
        return _narrow_bits(x)
    raise TypeError(f"a tensor of {x.dtype.name}; it must be float32, float16, float64 or bfloat16")


@elementwise
def _wide(x: tf.Tensor) -> tf.Tensor:
    """Return ``as_float32(x)`` as wide values, also of a scheme's numpy norms."""
    if x.dtype == tf.float64:
        return _rounded(x)
    bits = _bits(x)
    wide = tf.cast(tf.bitcast(bits, tf.float32), tf.float64)
    if x.dtype == tf.float16:
        return wide
    magnitude = bits & _ABS
    subnormal = tf.cast(magnitude, tf.float64) * _STEP
    subnormal = tf.where(bits > _ABS, -subnormal, subnormal)
    return tf.where(magnitude < _NORMAL_BITS, subnormal, wide)


@elementwise
def _rounded(values: tf.Tensor) -> tf.Tensor:
    """Round float64 values to float32, as wide values."""
    subnormal = tf.round(values * _STEPS_IN_ONE) * _STEP
    normal = tf.cast(tf.cast(values, tf.float32), tf.float64)
    return tf.where(tf.abs(values) < _NORMAL, subnormal, normal)


@elementwise
def _narrow_bits(values: tf.Tensor) -> tf.Tensor:
    """Round float64 values to float32, as bits."""
    bits = tf.bitcast(tf.cast(values, tf.float32), tf.uint32)  # subnormal or flushed, the sign is right
    magnitude = tf.abs(values)
    subnormal = tf.cast(tf.round(tf.minimum(magnitude, _NORMAL) * _STEPS_IN_ONE), tf.uint32)
    return tf.where(magnitude < _NORMAL, (bits & _SIGN) | subnormal, bits)


@elementwise
def _stored(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Round float64 values to float32, and then to ``dtype``."""
    if dtype == tf.float64:
        return _rounded(values)
    if dtype == tf.float16:  # subnormal float32 numbers become zero
        return tf.cast(tf.cast(values, tf.float32), tf.float16)
    bits = _narrow_bits(values)
    if dtype == tf.float32:
        return tf.bitcast(bits, tf.float32)
    if dtype == tf.bfloat16:
        odd = tf.bitwise.right_shift(bits, np.uint32(16)) & np.uint32(1)
        rounded = tf.bitwise.right_shift(bits + odd + np.uint32(0x7FFF), np.uint32(16))
        rounded = tf.where((bits & _ABS) > _INF_BITS, np.uint32(0x7FC0), rounded)
        return tf.bitcast(tf.cast(rounded, tf.uint16), tf.bfloat16)
    raise TypeError(f"a tensor of {dtype.name} to decode to; use float32, float16, float64 or bfloat16")


def _wide_scalar(value: Number) -> Any:
    if tf.is_tensor(value):
        return _wide(value)
    with np.errstate(over="ignore"):
        return np.float64(np.float32(value))


def with_nonfinite(values: tf.Tensor, flags: tf.Tensor, number: float) -> tf.Tensor:
    """Replace flagged values by ``number``, infinity or NaN.

    Under ``tf.debugging.enable_check_numerics`` a graph with such a number as a constant fails.
    """
    dtype = values.dtype
    unsigned = _UNSIGNED[dtype.size]
    bits = np.array([number], dtype.as_numpy_dtype).view(unsigned.as_numpy_dtype)[0]
    return tf.bitcast(tf.where(flags, bits, tf.bitcast(values, unsigned)), dtype)


# ---- other conversions -------------------------------------------------------------------------------------------


def _unsigned(x: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(x, tf.uint32)


def _signed(x: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(x, tf.int32)


def _minus(x: tf.Tensor) -> tf.Tensor:
    return tf.constant(0, tf.uint32) - x


def _padded(x: tf.Tensor, multiple: int) -> tf.Tensor:
    missing = -x.shape[0] % multiple
    return tf.concat([x, tf.zeros([missing], x.dtype)], 0) if missing else x


def _per_element(per_bucket: tf.Tensor, bucket_size: int, elements: int) -> tf.Tensor:
    size = min(bucket_size, elements)
    spread = tf.broadcast_to(per_bucket[:, None], [per_bucket.shape[0], size])
    return tf.reshape(spread, [-1])[:elements]


def _no_buffer(out: None) -> None:
    if out is not None:
        raise ValueError("out: the TensorFlow kernels write into no buffer; leave it None")


# ---- random bits -------------------------------------------------------------------------------------------------


def hash32(start: int, count: int, key: Key) -> tf.Tensor:
    k0, k1 = (each if tf.is_tensor(each) else tf.constant(np.uint32(each)) for each in (key.k0, key.k1))
    index = tf.cast(tf.range(count, dtype=tf.int64), tf.uint32)
    h = _hashed(index, k0 + np.uint32(start * WEYL & ALL_ONES), k1)
    # Most keys have none of these.
    if key.shift:
        h = tf.bitwise.left_shift(h, np.uint32(key.shift))
    if key.addend:
        h += np.uint32(key.addend)
    return h ^ np.uint32(key.flip) if key.flip else h


@elementwise
def _hashed(index: tf.Tensor, first: tf.Tensor, k1: tf.Tensor) -> tf.Tensor:
    h = index * np.uint32(WEYL) + first
    h ^= tf.bitwise.right_shift(h, np.uint32(16))
    h *= np.uint32(MULTIPLIER_1)
    h ^= tf.bitwise.right_shift(h, np.uint32(15))
    h += k1
    h *= np.uint32(MULTIPLIER_2)
    return h ^ tf.bitwise.right_shift(h, np.uint32(16))


class RngKey(keys.RngKey):
    """An `horovod_quant.kernels.keys.RngKey` that also accepts scalar integer tensors as steps and workers."""

    def key(self, domain: str, step: Number, worker: Number = 0) -> Key:
        """Return the key of one rounding.

        With a tensor, its words are uint32 tensors.
        """
        state: Any = self.state(domain)
        for value in (step, worker):
            if tf.is_tensor(state) or tf.is_tensor(value):
                state = _absorb(_uint64(state), _uint64(value))
            else:
                state = keys._absorb(state, int(value))
        if not tf.is_tensor(state):
            return Key(state & ALL_ONES, state >> 32)
        return Key(tf.cast(state, tf.uint32), tf.cast(tf.bitwise.right_shift(state, _uint64(32)), tf.uint32))


def _uint64(value: Any) -> tf.Tensor:
    if not tf.is_tensor(value):
        return tf.constant(int(value) & keys._MASK64, tf.uint64)
    return value if value.dtype == tf.uint64 else tf.bitcast(tf.cast(value, tf.int64), tf.uint64)


def _absorb(state: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    state = (state ^ value) + _uint64(keys.INCREMENT)
    state = (state ^ tf.bitwise.right_shift(state, _uint64(30))) * _uint64(keys.MIX_1)
    state = (state ^ tf.bitwise.right_shift(state, _uint64(27))) * _uint64(keys.MIX_2)
    return state ^ tf.bitwise.right_shift(state, _uint64(31))


# ---- norms -------------------------------------------------------------------------------------------------------


def bucket_maxima(x: tf.Tensor, bucket_size: int, out: None = None) -> tf.Tensor:
    _no_buffer(out)
    return tf.bitcast(tf.minimum(_largest_bits(_bits(x), bucket_size), _INF_BITS), tf.float32)


def _largest_bits(bits: tf.Tensor, bucket_size: int) -> tf.Tensor:
    size = filled_bucket_size(bits.shape[0], bucket_size)
    return tf.reduce_max(tf.reshape(_padded(bits & _ABS, size), [-1, size]), axis=1)


def bucket_square_sums(x: tf.Tensor, bucket_size: int, out: None = None) -> tf.Tensor:
    return _bucket_sums(x, bucket_size, out, lambda values: -values * values)


def bucket_sums(x: tf.Tensor, bucket_size: int, out: None = None) -> tf.Tensor:
    return _bucket_sums(x, bucket_size, out, operator.neg)


def bucket_magnitude_sums(x: tf.Tensor, bucket_size: int, out: None = None) -> tf.Tensor:
    return _bucket_sums(x, bucket_size, out, lambda values: -tf.abs(values))


def _bucket_sums(
    x: tf.Tensor, bucket_size: int, out: None, minus_term: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    _no_buffer(out)
    size = filled_bucket_size(x.shape[0], bucket_size)
    values = _padded(_wide(x), size)
    return _to_24_bits(
        _lanes_in_a_tree(_minus_sum_of_rows(tf.reshape(minus_term(values), [-1, size // ROW, ROW])))
    )


@by_rows
def _lanes_in_a_tree(lanes: tf.Tensor) -> tf.Tensor:
    half = ROW // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half:]
        half //= 2
    return lanes[:, 0]


@elementwise
def _to_24_bits(values: tf.Tensor) -> tf.Tensor:
    bits = tf.bitcast(values, tf.uint64)
    dropped = _uint64(_DROPPED_BITS)
    kept = tf.bitwise.right_shift(bits + _uint64(1 << (_DROPPED_BITS - 1)), dropped)
    rounded = tf.bitcast(tf.bitwise.left_shift(kept, dropped), tf.float64)
    broken = tf.bitwise.bitwise_and(bits, _uint64(0x7FFFFFFFFFFFFFFF)) >= _uint64(0x7FF0000000000000)
    return with_nonfinite(rounded, broken, np.inf)


@by_rows
def _minus_sum_of_rows(grid: tf.Tensor) -> tf.Tensor:
    """Return minus the sum over axis 1, in order of rows.

    Reductions have no fixed order. It uses subtractions, because Grappler merges additions into one operation that adds
    in another order.
    """
    count = grid.shape[1]
    first = tf.zeros_like(grid[:, 0])
    if count <= _MOST_ROWS_IN_A_CHAIN:
        return functools.reduce(operator.sub, tf.unstack(grid, axis=1), first)
    _, total = tf.while_loop(
        lambda row, total: row < count, lambda row, total: (row + 1, total - grid[:, row]), (0, first)
    )
    return total


def norms_of_square_sums(square_sums: tf.Tensor) -> tf.Tensor:
    return _stored(tf.sqrt(square_sums), tf.float32)


def inverse_norms(norms: tf.Tensor, numerator: float) -> tf.Tensor:
    return _stored(_wide_inverse(norms, numerator), tf.float32)


def _wide_inverse(norms: tf.Tensor, numerator: float) -> tf.Tensor:
    wide = _wide(norms)
    usable = (wide >= np.float64(MIN_NORM)) & (wide <= _LARGEST)
    quotients = _rounded(_wide_scalar(numerator) / tf.where(usable, wide, np.float64(1)))
    return tf.where(usable, quotients, np.float64(0))


def decoding_scales(norms: tf.Tensor, levels: int, factor: Number) -> tf.Tensor:
    return _stored(_wide_scales(norms, levels, factor), tf.float32)


def _wide_scales(norms: tf.Tensor, levels: int, factor: Number) -> tf.Tensor:
    wide = _wide(norms)
    finite = wide <= _LARGEST
    # Grappler and XLA turn a division by a constant into a multiplication by its rounded inverse.
    divisor = tf.where(finite, np.float64(levels), np.float64(1))
    scales = _rounded(_rounded(wide / divisor) * _wide_scalar(factor))
    return with_nonfinite(scales, ~finite, np.nan)


# ---- uniform levels ----------------------------------------------------------------------------------------------


def round_uniform(
    x: tf.Tensor, norms: tf.Tensor, bucket_size: int, levels: int, key: Key, start: int = 0
) -> tf.Tensor:
    k = fraction_bits(levels)
    limit = np.float32(levels << k)
    inverse = _per_element(_wide_inverse(norms, levels << k), bucket_size, x.shape[0])
    y = tf.cast(_wide(x) * inverse, tf.float32)  # values flushed to zero are truncated to zero anyway
    y = tf.where(y < limit, y, limit)
    y = tf.where(y > -limit, y, -limit)
    random = tf.bitwise.right_shift(hash32(start, x.shape[0], key), np.uint32(32 - k))
    # Unsigned, larger by `levels`, because TensorFlow shifts int32 on the host.
    raised = _unsigned(tf.cast(y, tf.int32)) + random + np.uint32(levels << k)
    return _signed(tf.bitwise.right_shift(raised, np.uint32(k)) - np.uint32(levels))


def encode_uniform_sum(
    x: tf.Tensor,
    norms: tf.Tensor,
    bucket_size: int,
    levels: int,
    width: int,
    key: Key,
    start: int = 0,
    out: None = None,
) -> tf.Tensor:
    return pack_sum(round_uniform(x, norms, bucket_size, levels, key, start), width, out)


def decode_uniform_sum(
    words: tf.Tensor,
    norms: tf.Tensor,
    bucket_size: int,
    levels: int,
    width: int,
    factor: Number,
    out: tf.TensorSpec,
) -> tf.Tensor:
    """Return ``digit * (norm / levels * factor)``, typed as ``out``."""
    elements = out.shape[0]
    digits = tf.cast(unpack_sum(words, width, elements), tf.float64)
    scales = _per_element(_wide_scales(norms, levels, factor), bucket_size, elements)
    return _stored(digits * scales, out.dtype)


def encode_uniform_codes(
    x: tf.Tensor,
    norms: tf.Tensor,
    bucket_size: int,
    bits: int,
    key: Key,
    start: int = 0,
    out: None = None,
) -> tf.Tensor:
    digits = round_uniform(x, norms, bucket_size, uniform_levels(bits), key, start)
    return pack_codes(codes_of_digits(digits, bits), bits, out)


def decode_uniform_codes(
    words: Sequence[tf.Tensor],
    norms: Sequence[tf.Tensor],
    bucket_size: int,
    bits: int,
    factor: Number,
    out: tf.TensorSpec,
) -> tf.Tensor:
    """Return the workers' decoded sum, shaped and typed as ``out``."""
    return _add_workers(
        words, norms, bucket_size, bits, out,
        value=lambda digits: tf.cast(digits, tf.float64),
        scale=lambda worker_norms: _wide_scales(worker_norms, uniform_levels(bits), factor),
    )  # fmt: skip


# ---- exponential levels ------------------------------------------------------------------------------------------


def round_exponential(
    x: tf.Tensor, norms: tf.Tensor, bucket_size: int, bits: int, key: Key, start: int = 0
) -> tf.Tensor:
    top = uniform_levels(bits)
    inverse = _per_element(_wide_inverse(norms, 1.0), bucket_size, x.shape[0])
    y_bits = _narrow_bits(_wide(x) * inverse)
    magnitude = tf.minimum(y_bits & _ABS, _ONE_BITS)
    h = hash32(start, x.shape[0], key)
    if key.mirror:
        h = tf.where(y_bits > _ABS, h ^ np.uint32(key.mirror), h)
    exponent = tf.bitwise.right_shift(magnitude + tf.bitwise.right_shift(h, np.uint32(9)), np.uint32(23))
    index = exponent - np.uint32(127 - top)
    if (
        top < 127
    ):  # at 8 bits the smallest level is the smallest normal float, and subnormals are linear anyway
        smallest = np.uint32((128 - top) << 23)
        value = tf.bitcast(tf.minimum(magnitude, smallest), tf.float32)
        cut = tf.cast(value * np.float32(2.0 ** (top - 1 + 24)), tf.uint32)
        below = tf.bitwise.right_shift(cut + tf.bitwise.right_shift(h, np.uint32(8)), np.uint32(24))
        index = tf.where(magnitude < smallest, below, index)
    return _signed(tf.where(y_bits > _ABS, _minus(index), index))


def encode_exponential(
    x: tf.Tensor,
    norms: tf.Tensor,
    bucket_size: int,
    bits: int,
    key: Key,
    start: int = 0,
    out: None = None,
) -> tf.Tensor:
    digits = round_exponential(x, norms, bucket_size, bits, key, start)
    return pack_codes(codes_of_digits(digits, bits), bits, out)


def exponential_values(digits: tf.Tensor, bits: int) -> tf.Tensor:
    unsigned = _unsigned(digits)
    sign = unsigned & _SIGN
    index = tf.where(sign > 0, _minus(unsigned), unsigned)
    exponent = tf.where(index > 0, index + np.uint32(127 - uniform_levels(bits)), np.uint32(0))
    return tf.bitcast(tf.bitwise.left_shift(exponent, np.uint32(23)) | sign, tf.float32)


def decode_exponential(
    words: Sequence[tf.Tensor],
    norms: Sequence[tf.Tensor],
    bucket_size: int,
    bits: int,
    factor: Number,
    out: tf.TensorSpec,
) -> tf.Tensor:
    """Return the workers' decoded sum, shaped and typed as ``out``."""
    return _add_workers(
        words, norms, bucket_size, bits, out,
        value=lambda digits: tf.cast(exponential_values(digits, bits), tf.float64),
        scale=lambda worker_norms: _wide_scales(worker_norms, 1, factor),
    )  # fmt: skip


def _add_workers(words, norms, bucket_size, bits, out, value, scale):
    elements = out.shape[0]
    total = None
    for worker_words, worker_norms in zip(words, norms):
        digits = digits_of_codes(unpack_codes(worker_words, bits, elements), bits)
        product = value(digits) * _per_element(scale(worker_norms), bucket_size, elements)
        total = product if total is None else _rounded(total) + _rounded(product)
    return _stored(total, out.dtype)


# ---- one bit -----------------------------------------------------------------------------------------------------


def binarize(
    gradient: tf.Tensor,
    momentum: tf.Variable,
    scale: tf.Variable,
    beta: float,
    key: Key,
    start: int = 0,
    out: None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Binarize as the reference.

    Assigns momentum and scale, of any shape, before returning words.
    """
    _no_buffer(out)
    words, broken, *updated = binarized(
        gradient, tf.reshape(momentum, [-1]), tf.reshape(scale, [-1]), beta, key, start
    )
    assigned = [
        variable.assign(tf.reshape(value, variable.shape), read_value=False)
        for variable, value in zip((momentum, scale), updated)
    ]
    with tf.control_dependencies(assigned):
        return tf.identity(words), tf.identity(broken)


def binarized(
    gradient: tf.Tensor, momentum: tf.Tensor, scale: tf.Tensor, beta: float, key: Key, start: int = 0
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Binarize without side effects: return words, non-finite tiles, new momentum, new scale."""
    elements = gradient.shape[0]
    broken = _largest_bits(_bits(gradient), TILE) >= _INF_BITS
    sound = _per_element(~broken, TILE, elements)
    g, m, s = _wide(gradient), _wide(momentum), _wide(scale)
    keep, take = _wide_scalar(beta), _wide_scalar(1.0 - beta)
    m = tf.where(sound, _rounded(_rounded(m * keep) + _rounded(g * take)), m)
    s = tf.where(sound, _rounded(_rounded(s * keep) + _rounded(tf.abs(g) * take)), s)
    width = tf.where(s >= _NORMAL, s, np.float64(1))
    raised = tf.bitwise.right_shift(hash32(start, elements, key) ^ _SIGN, np.uint32(8))
    uniform = tf.cast(raised, tf.float64) * 2.0**-23 - 1.0
    bits = tf.cast(_rounded(uniform * width) < m, tf.uint32)
    words = pack_codes(bits, 1, whole_tiles=True)
    return words, broken, _stored(m, tf.float32), _stored(s, tf.float32)


def vote(words: Sequence[tf.Tensor], key: Key, start: int = 0, out: None = None) -> tf.Tensor:
    n = len(words)
    k = min(24, 32 - n.bit_length())
    elements = words[0].shape[0] * 32
    gathered = _signed(tf.concat([_unsigned(one) for one in words], 0))
    ones = tf.reduce_sum(tf.reshape(unpack_codes(gathered, 1, n * elements), [n, elements]), axis=0)
    random = tf.bitwise.right_shift(hash32(start, elements, key), np.uint32(32 - k))
    bits = random * np.uint32(n) < tf.bitwise.left_shift(ones, np.uint32(k))
    return pack_codes(tf.cast(bits, tf.uint32), 1, out, whole_tiles=True)


def decode_signs(words: tf.Tensor, magnitude: Number, out: tf.TensorSpec) -> tf.Tensor:
    """Return plus or minus the magnitude, shaped and typed as ``out``.

    It is plus for a bit that is 1, minus for 0.
    """
    bits = unpack_codes(words, 1, out.shape[0])
    wide = tf.convert_to_tensor(_wide_scalar(magnitude), tf.float64)
    return tf.where(bits > 0, _stored(wide, out.dtype), _stored(-wide, out.dtype))


# ---- arithmetic for schemes --------------------------------------------------------------------------------------


def tensor_maximum(x: tf.Tensor) -> tf.Tensor:
    return bucket_maxima(x, WHOLE_TENSOR) if x.shape[0] else tf.zeros([1])


def tensor_mean_magnitude(x: tf.Tensor) -> tf.Tensor:
    total = _to_24_bits(_in_a_tree(bucket_magnitude_sums(x, TILE)))
    return _stored(total * inverse_count(x.shape[0]), tf.float32)


def tensor_deviation(x: tf.Tensor) -> tf.Tensor:
    inverse = inverse_count(x.shape[0])
    mean = _to_24_bits(_to_24_bits(_in_a_tree(bucket_sums(x, TILE))) * inverse)
    squares = _to_24_bits(_in_a_tree(bucket_square_sums(x, TILE)))
    variance = squares * inverse - mean * mean
    variance = tf.where(variance > 0, variance, np.float64(0))
    finite = squares <= np.finfo(np.float64).max
    return norms_of_square_sums(with_nonfinite(variance, ~finite, np.inf))


def less(a: tf.Tensor, b: Operand) -> tf.Tensor:
    return _wide(a) < _operand(b, a.shape[0])


def where(flags: tf.Tensor, a: Operand, b: Operand) -> tf.Tensor:
    elements = flags.shape[0]
    return tf.where(flags, _narrow_operand(a, elements), _narrow_operand(b, elements))


def minimum(a: tf.Tensor, b: Operand) -> tf.Tensor:
    most = _narrow_operand(b, a.shape[0])
    return tf.where(_operand(b, a.shape[0]) < _wide(a), most, to_float32(a))


def next_powers_of_two(norms: tf.Tensor) -> tf.Tensor:
    magnitudes = tf.minimum(_bits(tf.convert_to_tensor(norms)) & _ABS, _INF_BITS)
    return tf.bitcast((magnitudes + np.uint32(0x007FFFFF)) & _INF_BITS, tf.float32)


def _operand(values: Operand, elements: int) -> Any:
    """Return a wide number, or wide values of one or all elements."""
    if not tf.is_tensor(values) and not isinstance(values, np.ndarray):
        return _wide_scalar(values)
    check_operand(values.shape[0], elements)
    return _wide(values)


def _narrow_operand(values: Operand, elements: int) -> tf.Tensor:
    if not tf.is_tensor(values) and not isinstance(values, np.ndarray):
        return _stored(tf.constant([_wide_scalar(values)], tf.float64), tf.float32)
    check_operand(values.shape[0], elements)
    return to_float32(tf.convert_to_tensor(values))


# ---- among the workers of a node -------------------------------------------------------------------------------------


def to_float32(x: tf.Tensor, out: None = None) -> tf.Tensor:
    _no_buffer(out)
    return tf.bitcast(_bits(x), tf.float32)


def to_float16(x: tf.Tensor, out: None = None) -> tf.Tensor:
    _no_buffer(out)
    return _stored(_wide(x), tf.float16)


def mean(arrays: Sequence[tf.Tensor]) -> tf.Tensor:
    # A rounding between two additions keeps Grappler from merging them.
    total = functools.reduce(
        lambda total, array: _rounded(total + _wide(array)), arrays[1:], _wide(arrays[0])
    )
    return _stored(total * np.float64(np.float32(1.0 / len(arrays))), tf.float32)


def clip(x: tf.Tensor, most: float) -> tf.Tensor:
    """Clip as `horovod_quant.kernels.sums.clip`; the result is always float32."""
    norm = _wide(norms_of_square_sums(_in_a_tree(bucket_square_sums(x, TILE))))
    longest = np.float64(np.float32(most))
    too_long = (norm > longest) & (norm <= _LARGEST)
    factors = tf.where(too_long, _rounded(longest / tf.where(too_long, norm, np.float64(1))), np.float64(1))
    return _stored(_wide(x) * factors[0], tf.float32)


def _in_a_tree(sums: tf.Tensor) -> tf.Tensor:
    if not sums.shape[0]:
        return tf.zeros([1], tf.float64)
    while (count := sums.shape[0]) > 1:
        half = (count + 1) // 2
        sums = sums[:half] + tf.pad(sums[half:], [[0, 2 * half - count]])
    return sums


def scale(pieces: Sequence[tf.Tensor], factor: Number, out: tf.TensorSpec) -> tf.Tensor:
    return _stored(_wide(concatenate(pieces)) * _wide_scalar(factor), out.dtype)


# ---- packing -----------------------------------------------------------------------------------------------------


def codes_of_digits(digits: tf.Tensor, bits: int) -> tf.Tensor:
    unsigned = _unsigned(digits)
    negative = tf.bitwise.right_shift(unsigned, np.uint32(31))
    magnitude = tf.where(negative > 0, _minus(unsigned), unsigned)
    return magnitude | tf.bitwise.left_shift(negative, np.uint32(bits - 1))


def digits_of_codes(codes: tf.Tensor, bits: int) -> tf.Tensor:
    magnitude = codes & np.uint32((1 << (bits - 1)) - 1)
    return _signed(tf.where(codes > np.uint32((1 << (bits - 1)) - 1), _minus(magnitude), magnitude))


def pack_sum(digits: tf.Tensor, width: int, out: None = None) -> tf.Tensor:
    _no_buffer(out)
    fields = 32 // width
    grid = tf.reshape(_padded(_unsigned(digits), ROW * fields), [-1, fields, ROW])
    return _signed(tf.reshape(tf.reduce_sum(tf.bitwise.left_shift(grid, _shifts(width)), axis=1), [-1]))


def unpack_sum(words: tf.Tensor, width: int, elements: int) -> tf.Tensor:
    check_sum_words(words.shape[0], elements, width)
    bias = sum(1 << (width * field + width - 1) for field in range(32 // width))
    biased = tf.reshape(_unsigned(words) + np.uint32(bias), [-1, 1, ROW])
    raised = tf.bitwise.right_shift(biased, _shifts(width)) & np.uint32((1 << width) - 1)
    return _signed(tf.reshape(raised - np.uint32(1 << (width - 1)), [-1])[:elements])


def _shifts(width: int) -> np.ndarray:
    return (np.arange(32 // width, dtype=np.uint32) * np.uint32(width))[:, None]


def pack_codes(codes: tf.Tensor, bits: int, out: None = None, whole_tiles: bool = False) -> tf.Tensor:
    _no_buffer(out)
    words = tf.reshape(_packed(tf.reshape(_padded(codes, TILE), [-1, 32, ROW]), bits), [-1])
    if not whole_tiles:
        words = words[: code_words(codes.shape[0], bits)]
    return _signed(words)


def unpack_codes(words: tf.Tensor, bits: int, elements: int) -> tf.Tensor:
    check_code_words(words.shape[0], elements, bits)
    used = tiles(elements) * bits * ROW
    grid = tf.reshape(_padded(_unsigned(words), bits * ROW)[:used], [-1, bits, ROW])
    return tf.reshape(_unpacked(grid, bits), [-1])[:elements]


@by_rows
def _packed(grid: tf.Tensor, bits: int) -> tf.Tensor:
    """Pack each tile's rows of codes into rows of words."""
    rows, right_shifts, factors = _pack_plan(bits)
    if 32 % bits:
        grid = tf.bitwise.right_shift(tf.gather(grid, rows, axis=1), right_shifts)
    fields = tf.reshape(grid * factors, [-1, bits, len(rows) // bits, ROW])
    return tf.reduce_sum(fields, axis=2)


@by_rows
def _unpacked(grid: tf.Tensor, bits: int) -> tf.Tensor:
    """Unpack each tile's rows of words into rows of codes."""
    word, shift = np.divmod(np.arange(32) * bits, 32)
    codes = tf.bitwise.right_shift(tf.gather(grid, word, axis=1), shift.astype(np.uint32)[:, None])
    if 32 % bits:
        following = tf.gather(grid, np.minimum(word + 1, bits - 1), axis=1)
        factors = np.where(shift + bits > 32, 1 << (32 - shift), 0).astype(np.uint32)[:, None]
        codes |= following * factors
    return codes & np.uint32((1 << bits) - 1)


def _pack_plan(bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows of a tile in each of its words.

    They are ``(row >> right_shift) * factor``, the same number for each word.
    """
    plan: list[list[tuple[int, int, int]]] = [[] for _ in range(bits)]
    for row in range(32):
        word, shift = divmod(row * bits, 32)
        plan[word].append((row, 0, 1 << shift))
        if shift + bits > 32:
            plan[word + 1].append((row, 32 - shift, 1))
    longest = max(map(len, plan))
    table = np.array([own + [(0, 0, 0)] * (longest - len(own)) for own in plan], np.uint32).reshape(-1, 3)
    return table[:, 0].astype(np.int32), table[:, 1:2], table[:, 2:3]


# ---- what the schemes do with arrays -----------------------------------------------------------------------------


def pack(parts: Sequence[tuple[int, Any, Callable[[None], Any]]]) -> tf.Tensor:
    """Concatenate the results of ``fill`` of each ``(length, dtype, fill)``.

    Int32 where dtypes differ.
    """
    types = {tf.as_dtype(dtype) for _, dtype, _ in parts}
    dtype = types.pop() if len(types) == 1 else tf.int32
    return concatenate([tf.zeros([0], dtype), *(view(fill(None), dtype) for _, _, fill in parts)])


def concatenate(arrays: Sequence[Any]) -> tf.Tensor:
    tensors = [tf.convert_to_tensor(array) for array in arrays]
    dtype = tensors[0].dtype
    moved = tf.uint32 if dtype == tf.int32 else dtype
    return view(tf.concat([view(tensor, moved) for tensor in tensors], 0), dtype)


def empty(elements: int) -> tf.TensorSpec:
    return tf.TensorSpec([elements], tf.float32)


def view(array: Any, dtype: Any) -> tf.Tensor:
    array = tf.convert_to_tensor(array)
    return array if array.dtype == dtype else tf.bitcast(array, dtype)


def step_word(number: Number, out: None = None) -> tf.Tensor:
    _no_buffer(out)
    return _signed(tf.reshape(tf.cast(_uint64(number), tf.uint32), [1]))


def key_of_word(chain: keys.RngKey, domain: str, word: tf.Tensor, worker: int = 0) -> Key:
    return chain.key(domain, tf.cast(_unsigned(word)[0], tf.uint64), worker)


def pack_flags(flags: tf.Tensor) -> tf.Tensor:
    grid = tf.reshape(_padded(tf.cast(flags, tf.uint32), 32), [-1, 32])
    return _signed(tf.reduce_sum(tf.bitwise.left_shift(grid, np.arange(32, dtype=np.uint32)), axis=1))


def unpack_flags(words: tf.Tensor, count: int) -> tf.Tensor:
    bits = tf.bitwise.right_shift(_unsigned(words)[:, None], np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return tf.reshape(bits > 0, [-1])[:count]


def with_nan_tiles(values: tf.Tensor, broken: tf.Tensor) -> tf.Tensor:
    return with_nonfinite(values, _per_element(broken, TILE, values.shape[0]), np.nan)


# ---- EDEN --------------------------------------------------------------------------------------------------------

from horovod_quant.tensorflow.rotation import add_rotated, decode_rotated, encode_rotated  # noqa: E402, F401
from horovod_quant.tensorflow.segments import TensorFlowSegments  # noqa: E402

segments = TensorFlowSegments(sys.modules[__name__])
