"""EDEN's decoding kernel: levels, transforms, signs, and the workers' sum."""

import triton
import triton.language as tl

from horovod_quant.kernels.triton.columns import FACTOR, POINTERS, START, TARGET
from horovod_quant.kernels.triton.elements import (
    ROW,
    TILE,
    float_bits,
    float_pointer,
    program_of,
    signs_key,
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
from horovod_quant.kernels.triton.tiles import read_codes, write_tiles
from horovod_quant.kernels.triton.trellis import ascending_levels

KEY_ENTRIES = tl.constexpr(6)
"""Number of a key's entries in a list of pointers, see `signs_key`."""


@triton.jit
def add_rotated(
    table, owners,
    KIND: tl.constexpr, BITS: tl.constexpr, TRELLIS: tl.constexpr, WORKERS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Decode the sum of the workers' elements; ``TILES`` tiles per program.

    The list of pointers has each worker's words, scales and key.
    """
    row, block, left = program_of(table, owners, TILES * TILE)
    first = block * (TILES * TILE)
    index = 2 * ((tl.load(row + START) + first) // ROW)
    factor = float_bits(tl.load(row + FACTOR))
    pointers = table + tl.load(row + POINTERS)
    # Minus zero plus a number is the number, and has its sign.
    totals = tl.full([TILES, ROWS, ROW], 0x80000000, tl.uint32).to(tl.float32, bitcast=True)
    for worker in range(WORKERS):
        pointer = pointers + (2 + KEY_ENTRIES) * worker
        totals = totals + _workers_values(pointer, index, block, left, factor, BITS, TRELLIS, TILES)
    target = float_pointer(tl.load(row + TARGET), KIND) + first
    write_tiles(target, totals, left, KIND, TILES)


@triton.jit
def _workers_values(
    pointers, index, block, left, factor,
    BITS: tl.constexpr, TRELLIS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return one worker's elements."""
    count = coordinates(left)
    sizes = sizes_of(count, TILES)
    source = tl.load(pointers).to(tl.pointer_type(tl.uint32)) + block * (TILES * BITS * ROW)
    codes = read_codes(source, (count // ROW * BITS + 31) // 32, BITS, TILES)
    if TRELLIS:
        x = _trellis_values(codes, BITS, TILES)
    else:
        x = _values(codes, BITS, TILES)
    if left != TILES * TILE:
        x = tl.where((tl.arange(0, ROWS) * ROW)[None, :, None] < sizes[:, None, :], x, 0.0)
    k0, k1, turn, addend, flip = signs_key(pointers + 2, index)
    for number in range(2):
        signs = random_signs(1 - number, k0, k1, turn, addend, flip, TILES)
        x = signed(transformed(x, sizes, left), signs)
    tile = tl.arange(0, TILES)[:, None]
    scales = tl.load(pointers + 1).to(tl.pointer_type(tl.float32)) + block * TILES
    units = tl.load(scales + tile, mask=tile * TILE < left, other=0.0) * factor
    return x * units[:, None, :]


@triton.jit
def _values(codes, BITS: tl.constexpr, TILES: tl.constexpr):
    """Return the levels of codes."""
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
    """Return the levels of trellis codes.

    They depend on the codes in the two rows before.
    """
    row = tl.arange(0, ROWS).to(tl.uint32)[None, :, None]
    paths = tl.sum((codes & 1) << row, axis=1)[:, None, :]
    subset = (((paths << 1) >> row) & 1) | ((((paths ^ (paths << 2)) >> row) & 1) << 1)
    others = looked_up(ascending_levels(4, BITS, TILES), (codes >> 1) * 4 + subset)
    is_first = (tl.arange(0, ROWS) == 0)[None, :, None]
    return tl.where(is_first, looked_up(ascending_levels(2, BITS, TILES), codes), others)
