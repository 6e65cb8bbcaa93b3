"""Device functions for whole tiles, as tensors ``[TILES, 32, 32]``.

The axes are tile, row, lane: with one warp per tile each warp has a tile, and its thread i element i of each row, in
registers. One load or store has all rows: with one of them per row Triton's compiler takes seconds.
"""

import math

import triton
import triton.language as tl

from horovod_quant.kernels import layout
from horovod_quant.kernels.triton.elements import ROW, TILE, read, read_values, write


@triton.constexpr_function
def rows_alike(bucket, rows):
    """Return the number of consecutive rows always in one bucket.

    It applies to each group of ``rows`` rows.
    """
    return math.gcd(bucket // layout.ROW, rows, 32)


@triton.jit
def read_norms(norms, first, left, BUCKET: tl.constexpr, TILES: tl.constexpr, SIZE: tl.constexpr = TILE):
    """Read the norms of a program's rows, ``[TILES, groups, 1]``.

    One for each group of `rows_alike`.
    """
    ALIKE: tl.constexpr = rows_alike(BUCKET, SIZE // ROW)
    GROUPS: tl.constexpr = 32 // ALIKE
    group = tl.arange(0, GROUPS)[None, :, None] * ALIKE
    local_group = tl.arange(0, TILES)[:, None, None] * (SIZE // ROW) + group
    buckets = ((first // ROW).to(tl.int32) + local_group) // (BUCKET // ROW)
    there = (local_group * ROW < left) & (group * ROW < SIZE)
    return tl.load(norms + buckets, mask=there, other=0.0)


@triton.jit
def of_rows(values):
    """Broadcast values of groups of rows to elements.

    The shape ``[TILES, groups, 1]`` becomes ``[TILES, 32, 32]``.
    """
    TILES: tl.constexpr = values.shape[0]
    GROUPS: tl.constexpr = values.shape[1]
    wide = tl.broadcast_to(values[:, :, None, :], [TILES, GROUPS, 32 // GROUPS, ROW])
    return tl.reshape(wide, [TILES, 32, ROW])


@triton.jit
def rows_offsets():
    """Return the offsets of a tile's rows, ``[1, 32, 1]``."""
    return tl.arange(0, 32)[None, :, None] * ROW


@triton.jit
def tiles_offsets(TILES: tl.constexpr, SIZE: tl.constexpr = TILE):
    """Return offsets of each tile's first row, ``[TILES, 1, 32]``.

    A tile has ``SIZE`` elements.
    """
    return tl.arange(0, TILES)[:, None, None] * SIZE + tl.arange(0, ROW)[None, None, :]


@triton.jit
def read_tiles(
    source, left, KIND: tl.constexpr, TILES: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr = TILE
):
    """Read a program's ``left`` elements as ``[TILES, 32, 32]``.

    It uses `read_values` if ``VALUES``.
    """
    source = source + tiles_offsets(TILES, SIZE)
    if left == TILES * SIZE:
        x = _read(source, rows_offsets(), _rows(TILES, SIZE), KIND, VALUES)
    else:
        inside = (tiles_offsets(TILES, SIZE) + rows_offsets() < left) & _rows(TILES, SIZE)
        x = _read(source, rows_offsets(), inside, KIND, VALUES)
    return x


@triton.jit
def write_tiles(target, values, left, KIND: tl.constexpr, TILES: tl.constexpr, SIZE: tl.constexpr = TILE):
    target = target + tiles_offsets(TILES, SIZE)
    if left == TILES * SIZE:
        write(target, rows_offsets(), values, _rows(TILES, SIZE), KIND)
    else:
        inside = (tiles_offsets(TILES, SIZE) + rows_offsets() < left) & _rows(TILES, SIZE)
        write(target, rows_offsets(), values, inside, KIND)


@triton.jit
def _rows(TILES: tl.constexpr, SIZE: tl.constexpr):
    """Return the mask of a tile's rows, all true for 32 rows.

    A tile has ``SIZE`` elements.
    """
    if SIZE == TILE:
        there = tl.full([TILES, 32, ROW], True, tl.int1)
    else:
        there = tl.broadcast_to(rows_offsets() < SIZE, [TILES, 32, ROW])
    return there


@triton.jit
def _read(source, offsets, inside, KIND: tl.constexpr, VALUES: tl.constexpr):
    if VALUES:
        x = read_values(source, offsets, inside, KIND)
    else:
        x = read(source, offsets, inside, KIND)
    return x


@triton.jit
def write_codes(target, codes, word_rows, BITS: tl.constexpr, TILES: tl.constexpr):
    """Pack a program's codes as dense bit streams, one per lane.

    The codes ``[TILES, 32, 32]`` become rows of words.
    """
    tile = tl.arange(0, TILES)[:, None, None]
    lane = tl.arange(0, ROW)[None, None, :]
    shift = tl.arange(0, 32)[None, :, None] * BITS
    if 32 % BITS == 0:
        parts = tl.reshape(codes << (shift & 31).to(tl.uint32), [TILES, BITS, 32 // BITS, ROW])
        number = tile * BITS + tl.arange(0, BITS)[None, :, None]
        used = tl.broadcast_to(number < word_rows, [TILES, BITS, ROW])
        tl.store(target + (number * ROW + lane), tl.sum(parts, axis=2), mask=used)
    else:
        tile = tl.arange(0, TILES)[:, None]
        lane = tl.arange(0, ROW)[None, :]
        for number in tl.static_range(BITS):
            offset = shift - 32 * number
            begun = codes << tl.maximum(offset, 0).to(tl.uint32)
            parts = tl.where(offset < 0, codes >> tl.maximum(-offset, 0).to(tl.uint32), begun)
            words = tl.sum(tl.where((offset > -BITS) & (offset < 32), parts, 0), axis=1)
            used = tl.broadcast_to(tile * BITS + number < word_rows, [TILES, ROW])
            tl.store(target + ((tile * BITS + number) * ROW + lane), words, mask=used)


@triton.jit
def read_codes(source, word_rows, BITS: tl.constexpr, TILES: tl.constexpr):
    """Unpack the codes of `write_codes`."""
    shift = tl.arange(0, 32)[None, :, None] * BITS
    if 32 % BITS == 0:
        number = tl.arange(0, TILES)[:, None, None] * BITS + tl.arange(0, BITS)[None, :, None]
        at = number * ROW + tl.arange(0, ROW)[None, None, :]
        used = tl.broadcast_to(number < word_rows, [TILES, BITS, ROW])
        words = tl.load(source + at, mask=used, other=0)[:, :, None, :]
        words = tl.broadcast_to(words, [TILES, BITS, 32 // BITS, ROW])
        codes = tl.reshape(words, [TILES, 32, ROW]) >> (shift & 31).to(tl.uint32)
    else:
        tile = tl.arange(0, TILES)[:, None]
        lane = tl.arange(0, ROW)[None, :]
        codes = tl.zeros([TILES, 32, ROW], tl.uint32)
        for number in tl.static_range(BITS):
            used = tl.broadcast_to(tile * BITS + number < word_rows, [TILES, ROW])
            word = tl.load(source + ((tile * BITS + number) * ROW + lane), mask=used, other=0)[:, None, :]
            offset = shift - 32 * number
            begun = word >> tl.maximum(offset, 0).to(tl.uint32)
            parts = tl.where(offset < 0, word << tl.maximum(-offset, 0).to(tl.uint32), begun)
            codes = codes | tl.where((offset > -BITS) & (offset < 32), parts, 0)
    return codes & (2**BITS - 1)


@triton.constexpr_function
def words_of_a_tile(width):
    """Return the rows of words per tile of digits.

    A tile has 32 rows of elements or a few less.
    """
    return max(1, 32 // (32 // width))
