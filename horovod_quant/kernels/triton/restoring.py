"""EDEN's kernel back from codes: levels, Walsh-Hadamard transforms, signs, the sum of the workers' elements."""

# mypy: disable-error-code="assignment"
# Tuples of tensors grow in unrolled loops.

import triton
import triton.language as tl

from horovod_quant.kernels.triton.columns import FACTOR, POINTERS, START, TARGET
from horovod_quant.kernels.triton.decoding import tiles_codes
from horovod_quant.kernels.triton.elements import (
    ROW,
    TILE,
    below,
    elements_left,
    float_bits,
    float_pointer,
    place,
    signs_key,
    write,
)
from horovod_quant.kernels.triton.hadamard import (
    ROWS,
    coordinates,
    looked_up,
    random_signs,
    rows_of,
    signed,
    sizes_of,
    stacked,
    transformed,
)
from horovod_quant.kernels.triton.rotation import level
from horovod_quant.kernels.triton.trellis import ascending_levels

KEY_ENTRIES = tl.constexpr(6)
"""Numbers of a key in a list of pointers, see `signs_key`."""


@triton.jit
def add_rotated(
    table, owners,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BITS: tl.constexpr, TRELLIS: tl.constexpr, WORKERS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """The sum of the workers' elements. A program takes ``TILES`` tiles.

    The list of pointers holds each worker's words, scales and key.
    """
    row, block = place(table, owners)
    left = elements_left(row, block * (TILES * TILE), TILES * TILE)
    if left == TILES * TILE:
        _add_rotated(table, row, block, left, KIND, ALIGNED, BITS, TRELLIS, WORKERS, TILES, WHOLE=True)
    else:
        _add_rotated(table, row, block, left, KIND, ALIGNED, BITS, TRELLIS, WORKERS, TILES, WHOLE=False)


@triton.jit
def _add_rotated(
    table, row, block, left,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BITS: tl.constexpr, TRELLIS: tl.constexpr, WORKERS: tl.constexpr,
    TILES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    first = block * (TILES * TILE)
    index = 2 * ((tl.load(row + START) + first) // ROW)
    factor = float_bits(tl.load(row + FACTOR))
    pointers = table + tl.load(row + POINTERS)
    totals = _workers_values(pointers, index, block, left, factor, BITS, TRELLIS, TILES, WHOLE)
    for worker in range(1, WORKERS):
        own = pointers + (2 + KEY_ENTRIES) * worker
        totals = totals + _workers_values(own, index, block, left, factor, BITS, TRELLIS, TILES, WHOLE)
    rows = rows_of(totals)
    offsets = tl.arange(0, TILES)[:, None] * TILE + tl.arange(0, ROW)[None, :]
    target = float_pointer(tl.load(row + TARGET), KIND, ALIGNED) + first + offsets
    for number in tl.static_range(ROWS):
        write(target, number * ROW, rows[number], below(offsets + number * ROW, left, WHOLE), KIND)


@triton.jit
def _workers_values(
    pointers, index, block, left, factor,
    BITS: tl.constexpr, TRELLIS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One worker's elements, stacked rows."""
    count = coordinates(left)
    sizes = sizes_of(count, TILES)
    codes = stacked(
        tiles_codes(tl.load(pointers), block, (count // ROW * BITS + 31) // 32, BITS, TILES, WHOLE)
    )
    if TRELLIS:
        x = _trellis_values(codes, BITS, TILES)
    else:
        x = _values(codes, BITS, TILES)
    if not WHOLE:
        x = tl.where((tl.arange(0, ROWS) * ROW)[None, None, :] < sizes[:, :, None], x, 0.0)
    k0, k1, turn, addend, flip = signs_key(pointers + 2, index)
    x = signed(transformed(x, sizes, WHOLE), random_signs(1, k0, k1, turn, addend, flip, TILES))
    x = signed(transformed(x, sizes, WHOLE), random_signs(0, k0, k1, turn, addend, flip, TILES))
    tile = tl.arange(0, TILES)[:, None]
    scales = tl.load(pointers + 1).to(tl.pointer_type(tl.float32)) + block * TILES
    units = tl.load(scales + tile, mask=below(tile * TILE, left, WHOLE), other=0.0) * factor
    return x * units[:, :, None]


@triton.jit
def _values(codes, BITS: tl.constexpr, TILES: tl.constexpr):
    """The levels of codes."""
    if BITS == 1:
        values = tl.where(codes == 0, level(1, 0), -level(1, 0))
    elif BITS == 2:
        values = tl.where((codes & 1) != 0, level(2, 1), level(2, 0))
        values = tl.where(codes >= 2, -values, values)
    else:
        lane = tl.arange(0, ROW)[None, :]
        levels = tl.zeros([TILES, ROW], tl.float32)
        for i in tl.static_range(2 ** (BITS - 1)):
            levels = tl.where(lane == i, level(BITS, i), levels)
            levels = tl.where(lane == i + 2 ** (BITS - 1), -level(BITS, i), levels)
        values = looked_up(levels, codes)
    return values


@triton.jit
def _trellis_values(codes, BITS: tl.constexpr, TILES: tl.constexpr):
    """The same of codes whose levels depend on those of the two rows before."""
    rows = rows_of(codes)
    zeros = tl.zeros([TILES, ROW], tl.uint32)
    places = (zeros, (rows[1] >> 1) * 4 + ((rows[0] & 1) | ((rows[1] & 1) << 1)))
    for number in tl.static_range(2, 32):
        subset = (rows[number - 1] & 1) | (((rows[number] ^ rows[number - 2]) & 1) << 1)
        places = places + ((rows[number] >> 1) * 4 + subset,)
    others = looked_up(ascending_levels(4, BITS, TILES), stacked(places))
    is_first = (tl.arange(0, ROWS) == 0)[None, None, :]
    return tl.where(is_first, looked_up(ascending_levels(2, BITS, TILES), codes), others)
