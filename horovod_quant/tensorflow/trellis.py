"""Trellis-coded quantization in TensorFlow operations, bit-identical to `horovod_quant.kernels.trellis`.

All operations are in float32, since no number is subnormal: a bucket's unit is zero or more than 1, so distances are 0
or more than 2^-60. XLA contracts a product and a sum, but not with a minimum between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from horovod_quant.kernels.layout import ROW
from horovod_quant.kernels.trellis import BRANCHES, FAR, LEVELS, ascending, middles
from horovod_quant.tensorflow.cached_subgraph import by_rows, graph_of

_BITS_OF_AN_INDEX = 3
_INDEX = np.uint32((1 << _BITS_OF_AN_INDEX) - 1)
_FIRST = np.uint32(1)
"""Bit of the first row in words with a bit per row."""


def trellis_codes(z: tf.Tensor, units: tf.Tensor, bits: int, first_levels: tuple[float, ...]) -> tf.Tensor:
    """Return the codes of buckets' coordinates."""
    if tf.executing_eagerly():
        return _codes(z, units, bits, first_levels)
    signature = (tf.TensorSpec([None, z.shape[1]], tf.float32), tf.TensorSpec([None], tf.float32))
    # Inlined, hundreds of loops would take Grappler minutes.
    codes = graph_of(_codes, signature, (bits, first_levels), inline=False)(z, units)
    codes.set_shape(z.shape)
    return codes


@by_rows
def trellis_values(codes: tf.Tensor, bits: int, first_levels: tuple[float, ...]) -> tf.Tensor:
    """Return the levels of buckets' codes."""
    size = codes.shape[1]
    rows = tf.reshape(codes, [-1, size // ROW, ROW])
    branches = rows & np.uint32(1)
    none = tf.zeros_like(rows[:, :1])
    before = tf.concat([none, branches[:, :-1]], 1)
    earlier = tf.concat([none, before[:, :-1]], 1)
    levels = ascending(LEVELS[bits])
    indices = np.uint32(4) * tf.bitwise.right_shift(rows, np.uint32(1))
    indices += before + np.uint32(2) * (branches ^ earlier)
    indices = tf.concat([rows[:, :1] + np.uint32(len(levels)), indices[:, 1:]], 1)
    table = tf.constant([*levels, *ascending(first_levels)], tf.float32)
    return tf.reshape(tf.gather(table, tf.cast(indices, tf.int64)), [-1, size])


def _codes(z: tf.Tensor, units: tf.Tensor, bits: int, first_levels: tuple[float, ...]) -> tf.Tensor:
    size = z.shape[1]
    rows = tf.reshape(z, [-1, size // ROW, ROW])
    units = units[:, None, None]
    first_indices, sums = _nearest(rows[:, :1], units, ascending(first_levels), 2)
    indices, distances = _nearest(rows[:, 1:], units, ascending(LEVELS[bits]), 4)
    far = tf.fill(tf.shape(sums[0]), FAR)
    path = _path(tf.stack([*sums, far, far])[:, :, 0], tf.stack(distances))

    earlier = tf.bitwise.left_shift(path, np.uint32(2))
    low = tf.bitwise.left_shift(path, np.uint32(1)) | (path & _FIRST)
    high = (path ^ earlier) & ~_FIRST
    branch, low, high = (_bits_of_rows(word, size // ROW) for word in (path, low, high))
    field = np.uint32(_BITS_OF_AN_INDEX) * (low + np.uint32(2) * high)
    index = tf.bitwise.right_shift(tf.concat([first_indices, indices], 1), field) & _INDEX
    return tf.reshape(np.uint32(2) * index + branch, [-1, size])


def _nearest(
    rows: tf.Tensor, units: tf.Tensor, levels: Sequence[float], subsets: int
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Return the nearest levels' indices and distances in each subset.

    Indices are fields of words.
    """
    between = middles(levels, subsets)
    words, distances = tf.zeros_like(rows, tf.uint32), []
    for subset in range(subsets):
        index = tf.zeros_like(words)
        for middle in between[subset::subsets]:
            index += tf.cast(rows > units * np.float32(middle), tf.uint32)
        words |= tf.bitwise.left_shift(index, np.uint32(_BITS_OF_AN_INDEX * subset))
        level = tf.gather(tf.constant(levels[subset::subsets], tf.float32), tf.cast(index, tf.int64))
        difference = rows - tf.minimum(level * units, FAR)
        distances.append(tf.minimum(difference * difference, FAR))
    return words, distances


def _path(sums: tf.Tensor, distances: tf.Tensor) -> tf.Tensor:
    """Return each lane's branches, the first row's in the lowest bit.

    Args:
        sums: the sums of the states after the first row, ``[states, buckets, lanes]``.
        distances: ``[subsets, buckets, rows but the first, lanes]``.
    """
    # In loops, because Grappler and XLA are slower with separate operations for each row.
    count = distances.shape[2]
    sources, one, two = (np.array(column, np.int64) for column in zip(*BRANCHES))

    def step(row: tf.Tensor, sums: tf.Tensor, decisions: tf.Tensor) -> tuple[tf.Tensor, ...]:
        own = distances[:, :, row]
        low = tf.gather(sums, sources) + tf.gather(own, one)
        high = tf.gather(sums, sources + 2) + tf.gather(own, two)
        decisions = np.uint32(2) * decisions + tf.cast(high < low, tf.uint32)
        return row + 1, tf.minimum(low, high), decisions

    def step_back(
        row: tf.Tensor, decisions: tf.Tensor, branch: tf.Tensor, before: tf.Tensor, path: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        of = tf.unstack(decisions)
        earlier = tf.where(before, tf.where(branch, of[3], of[2]), tf.where(branch, of[1], of[0]))
        decisions = tf.bitwise.right_shift(decisions, np.uint32(1))
        return row + 1, decisions, before, (earlier & np.uint32(1)) > 0, _longer(path, branch)

    def is_left(row: tf.Tensor, *others: tf.Tensor) -> tf.Tensor:
        return row < count

    decisions = tf.zeros_like(sums, tf.uint32)
    if count:  # the loop's body would slice an empty tensor
        _, sums, decisions = tf.while_loop(is_left, step, (0, sums, decisions))
    # Not argmin, which has no fixed result for equal sums.
    of = tf.unstack(sums)
    before = tf.minimum(of[2], of[3]) < tf.minimum(of[0], of[1])
    branch = tf.where(before, of[3] < of[2], of[1] < of[0])
    path = tf.zeros_like(of[0], tf.uint32)
    if count:
        _, _, branch, _, path = tf.while_loop(is_left, step_back, (0, decisions, branch, before, path))
    return _longer(path, branch)


def _longer(path: tf.Tensor, branch: tf.Tensor) -> tf.Tensor:
    return np.uint32(2) * path + tf.cast(branch, tf.uint32)


def _bits_of_rows(words: tf.Tensor, rows: int) -> tf.Tensor:
    shifts = np.arange(rows, dtype=np.uint32)[:, None]
    return tf.bitwise.right_shift(words[:, None], shifts) & np.uint32(1)
