"""EDEN's kernels in TensorFlow operations, bit-identical to `horovod_quant.kernels.rotation`.

Tensors have static length. The transforms are in float32, since coordinates are never subnormal; values before and
after them are wide (see `horovod_quant.tensorflow.kernels`, which exports these functions).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from horovod_quant.kernels.checks import check_range
from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import ROW, TILE, tiles
from horovod_quant.kernels.reference import MIN_NORM
from horovod_quant.kernels.rotation import (
    LARGEST_SHIFT,
    LEVELS,
    ROWS_OF_A_SUM,
    SMALLEST,
    THRESHOLDS,
    check_scales,
    check_workers,
    rotated_elements,
)
from horovod_quant.kernels.trellis import FAR
from horovod_quant.tensorflow.cached_subgraph import by_rows, elementwise
from horovod_quant.tensorflow.kernels import (
    _INF_BITS,
    Number,
    _bits,
    _lanes_in_a_tree,
    _largest_bits,
    _minus_sum_of_rows,
    _no_buffer,
    _padded,
    _rounded,
    _stored,
    _wide,
    _wide_scalar,
    hash32,
    pack_codes,
    unpack_codes,
    with_nonfinite,
)
from horovod_quant.tensorflow.trellis import trellis_codes, trellis_values


def encode_rotated(
    x: tf.Tensor,
    bits: int,
    key: Key,
    start: int = 0,
    out: None = None,
    scales: None = None,
    trellis: bool = False,
) -> tuple[tf.Tensor, tf.Tensor]:
    _no_buffer(out)
    _no_buffer(scales)
    check_range("bits", bits, 1, 4)
    words, found = [tf.zeros([0], tf.uint32)], [tf.zeros([0], tf.float64)]
    for first, elements in _grids(x.shape[0]):
        codes, own_scales = _encoded(x[first : first + elements], bits, key, start + first, trellis)
        words.append(tf.bitcast(pack_codes(codes, bits), tf.uint32))
        found.append(own_scales)
    return tf.bitcast(tf.concat(words, 0), tf.int32), _stored(tf.concat(found, 0), tf.float32)


def decode_rotated(
    words: tf.Tensor,
    scales: tf.Tensor,
    bits: int,
    key: Key,
    factor: Number,
    out: tf.TensorSpec,
    start: int = 0,
    trellis: bool = False,
) -> tf.Tensor:
    return add_rotated([words], [scales], bits, [key], factor, out, start, trellis)


def add_rotated(
    words: Sequence[tf.Tensor],
    scales: Sequence[tf.Tensor],
    bits: int,
    keys: Sequence[Key],
    factor: Number,
    out: tf.TensorSpec,
    start: int = 0,
    trellis: bool = False,
) -> tf.Tensor:
    check_workers(words, scales, keys)
    check_range("bits", bits, 1, 4)
    for own in scales:
        check_scales(own.shape[0], out.shape[0])
    codes = [unpack_codes(own, bits, rotated_elements(out.shape[0])) for own in words]
    units = [_rounded(_wide(own) * _wide_scalar(factor)) for own in scales]
    decoded = _decoded(codes, units, bits, keys, out.shape[0], start, trellis)
    return _stored(functools.reduce(lambda total, more: _rounded(total + more), decoded), out.dtype)


def _grids(elements: int) -> list[tuple[int, int]]:
    """Return first element and length of whole and incomplete buckets."""
    whole = elements // TILE * TILE
    return [(first, count) for first, count in ((0, whole), (whole, elements - whole)) if count]


def _encoded(x: tf.Tensor, bits: int, key: Key, first: int, trellis: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the codes of buckets' coordinates, and the buckets' wide scales."""
    count = tiles(x.shape[0])
    size = rotated_elements(x.shape[0]) // count
    maxima = _largest_bits(_bits(x), TILE)
    finite = maxima < _INF_BITS
    usable = finite & (maxima >= np.float32(MIN_NORM).view(np.uint32))
    exponents = tf.cast(tf.bitwise.right_shift(maxima, np.uint32(23)), tf.int64) - 127
    shift = tf.where(usable, tf.minimum(exponents, np.int64(LARGEST_SHIFT)), np.int64(0))

    values = tf.reshape(_padded(_wide(x), size), [count, size])
    values = tf.where(usable[:, None], values, np.float64(0)) * _power(-shift)[:, None]
    values = tf.where(tf.abs(values) < np.float64(SMALLEST), np.float64(0), values)
    squares = _lane_sums(tf.cast(values * values, tf.float32))
    one, two = _signs(count, size, key, first)
    z = _transformed(_transformed(tf.cast(values, tf.float32) * one) * two)
    unit = _rounded(tf.sqrt(squares * size))
    codes, products = (_in_a_trellis if trellis else _nearest)(z, unit, bits)

    products = _lane_sums(tf.cast(products, tf.float32))
    scales = squares / tf.where(usable, products, np.float64(1)) * _power(shift)
    scales = tf.where(usable, _rounded(scales), np.float64(0))
    return tf.reshape(codes, [-1]), with_nonfinite(scales, ~finite, np.nan)


def _nearest(z: tf.Tensor, unit: tf.Tensor, bits: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return codes, and the products of coordinates and their levels, float64."""
    z, unit = tf.cast(z, tf.float64), unit[:, None]
    magnitudes = tf.abs(z)
    index = tf.zeros(z.shape, tf.uint32)
    for threshold in THRESHOLDS[bits]:
        index += tf.cast(magnitudes > _rounded(unit * np.float64(np.float32(threshold))), tf.uint32)
    negative = tf.cast(z < 0, tf.uint32)
    codes = index | tf.bitwise.left_shift(negative, np.uint32(bits - 1))
    return codes, magnitudes * tf.cast(_magnitudes(index, bits), tf.float64)


def _in_a_trellis(z: tf.Tensor, unit: tf.Tensor, bits: int) -> tuple[tf.Tensor, tf.Tensor]:
    codes = trellis_codes(z, tf.cast(unit, tf.float32), bits, LEVELS[bits])
    return codes, tf.cast(z, tf.float64) * tf.cast(_level_values(codes, bits, True), tf.float64)


def _decoded(
    codes: Sequence[tf.Tensor],
    units: Sequence[tf.Tensor],
    bits: int,
    keys: Sequence[Key],
    elements: int,
    start: int,
    trellis: bool,
) -> list[tf.Tensor]:
    """Return each worker's wide values.

    One transform of all buckets keeps the graph small.
    """
    found = [tf.zeros([len(keys), 0], tf.float64)]
    for first, own in _grids(elements):
        count = tiles(own)
        size = rotated_elements(own) // count
        at = first // TILE
        grid = tf.reshape(tf.concat([each[first : first + count * size] for each in codes], 0), [-1, size])
        levels = _level_values(grid, bits, trellis)
        signs = [_signs(count, size, key, start + first) for key in keys]
        one, two = (tf.concat(every, 0) for every in zip(*signs))
        restored = tf.cast(_transformed(_transformed(levels) * two) * one, tf.float64)
        own_units = tf.concat([each[at : at + count] for each in units], 0)
        values = tf.reshape(_rounded(restored * own_units[:, None]), [len(keys), -1])
        found.append(values[:, :own])
    return tf.unstack(tf.concat(found, 1))


def _level_values(codes: tf.Tensor, bits: int, trellis: bool) -> tf.Tensor:
    if trellis:
        return trellis_values(codes, bits, LEVELS[bits])
    levels = _magnitudes(codes & np.uint32((1 << (bits - 1)) - 1), bits)
    return tf.where(codes >= np.uint32(1 << (bits - 1)), -levels, levels)


@elementwise
def _magnitudes(index: tf.Tensor, bits: int) -> tf.Tensor:
    """Return the positive levels with these indices."""
    return tf.gather(tf.constant(LEVELS[bits], tf.float32), tf.cast(index, tf.int64))


@elementwise
def _power(exponent: tf.Tensor) -> tf.Tensor:
    """Return 2 to the power of an int64, float64."""
    return tf.bitcast(tf.bitwise.left_shift(exponent + 1023, np.int64(52)), tf.float64)


@by_rows
def _transformed(values: tf.Tensor) -> tf.Tensor:
    """Return the Walsh-Hadamard transform of each row."""
    size = values.shape[1]
    h = 1
    while h < size:
        a, b = tf.unstack(tf.reshape(values, [-1, size // (2 * h), 2, h]), axis=2)
        values = tf.stack([a + b, a - b], axis=2)
        h *= 2
    return tf.reshape(values, [-1, size])


def _signs(count: int, size: int, key: Key, first: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return +-1 for each element, for both rounds: see `horovod_quant.kernels.rotation`."""
    rows = hash32(2 * (first // ROW), 2 * count * (size // ROW), key)[:, None]
    bits = tf.bitwise.right_shift(rows, np.arange(ROW, dtype=np.uint32)) & np.uint32(1)
    signs = tf.reshape(tf.where(bits > 0, np.float32(-1), np.float32(1)), [-1, 2, ROW])
    one, two = (tf.reshape(each, [count, size]) for each in tf.unstack(signs, axis=1))
    return one, two


def _lane_sums(terms: tf.Tensor) -> tf.Tensor:
    """Return `horovod_quant.kernels.rotation.lane_sums` of each bucket.

    XLA may compute a term, a rounded float64 product, in float32, and contract it with the sum; not with a minimum
    between them. No term is near `FAR`.
    """
    count, size = terms.shape
    terms = tf.minimum(terms, FAR)
    rows = size // ROW
    short = min(ROWS_OF_A_SUM, rows)
    minus_sums = _minus_sum_of_rows(tf.reshape(terms, [count * (rows // short), short, ROW]))
    sums = tf.reshape(tf.cast(minus_sums, tf.float64), [count, rows // short, ROW])
    return _lanes_in_a_tree(_minus_sum_of_rows(sums))
