"""EDEN's kernel back from codes: levels, Walsh-Hadamard transforms, signs, the sum of the workers' elements."""

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
    signed,
    sizes_of,
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
        values = _workers_values(own, index, block, left, factor, BITS, TRELLIS, TILES, WHOLE)
        sums = ()
        for number in tl.static_range(ROWS):
            sums = sums + (totals[number] + values[number],)
        totals = sums
    offsets = tl.arange(0, TILES)[:, None] * TILE + tl.arange(0, ROW)[None, :]
    target = float_pointer(tl.load(row + TARGET), KIND, ALIGNED) + first + offsets
    for number in tl.static_range(ROWS):
        write(target, number * ROW, totals[number], below(offsets + number * ROW, left, WHOLE), KIND)


@triton.jit
def _workers_values(
    pointers, index, block, left, factor,
    BITS: tl.constexpr, TRELLIS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One worker's elements, by row."""
    count = coordinates(left)
    sizes = sizes_of(count, TILES)
    codes = tiles_codes(tl.load(pointers), block, (count // ROW * BITS + 31) // 32, BITS, TILES, WHOLE)
    if TRELLIS:
        x = _trellis_values(codes, sizes, BITS, TILES, WHOLE)
    else:
        x = _values(codes, sizes, BITS, TILES, WHOLE)
    k0, k1, turn, addend, flip = signs_key(pointers + 2, index)
    x = signed(transformed(x, sizes, WHOLE), random_signs(1, k0, k1, turn, addend, flip, TILES))
    x = signed(transformed(x, sizes, WHOLE), random_signs(0, k0, k1, turn, addend, flip, TILES))
    tile = tl.arange(0, TILES)[:, None]
    scales = tl.load(pointers + 1).to(tl.pointer_type(tl.float32)) + block * TILES
    units = tl.load(scales + tile, mask=below(tile * TILE, left, WHOLE), other=0.0) * factor
    found = ()
    for number in tl.static_range(ROWS):
        found = found + (x[number] * units,)
    return found


@triton.jit
def _values(codes, sizes, BITS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr):
    """The levels of codes, by row; 0 for rows that are not there."""
    lane = tl.arange(0, ROW)[None, :]
    levels = tl.zeros([TILES, ROW], tl.float32)
    for i in tl.static_range(2 ** (BITS - 1)):
        levels = tl.where(lane == i, level(BITS, i), levels)
        levels = tl.where(lane == i + 2 ** (BITS - 1), -level(BITS, i), levels)
    found = ()
    for number in tl.static_range(ROWS):
        code = codes[number]
        if BITS == 1:
            values = tl.where(code == 0, level(1, 0), -level(1, 0))
        elif BITS == 2:
            values = tl.where((code & 1) != 0, level(2, 1), level(2, 0))
            values = tl.where(code >= 2, -values, values)
        else:
            values = looked_up(levels, code)
        found = found + (_those_there(values, number, sizes, WHOLE),)
    return found


@triton.jit
def _trellis_values(codes, sizes, BITS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr):
    """The same of codes whose levels depend on those of the two rows before."""
    first_levels = ascending_levels(2, BITS, TILES)
    levels = ascending_levels(4, BITS, TILES)
    found = (looked_up(first_levels, codes[0]),)
    earlier = tl.zeros([TILES, ROW], tl.uint32)
    for number in tl.static_range(1, ROWS):
        before = codes[number - 1]
        subset = (before & 1) | (((codes[number] ^ earlier) & 1) << 1)
        values = looked_up(levels, (codes[number] >> 1) * 4 + subset)
        found = found + (_those_there(values, number, sizes, WHOLE),)
        earlier = before
    return found


@triton.jit
def _those_there(values, NUMBER: tl.constexpr, sizes, WHOLE: tl.constexpr):
    if not WHOLE:
        values = tl.where(sizes > NUMBER * ROW, values, 0.0)
    return values
