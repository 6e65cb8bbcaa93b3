"""Kernels that round elements to levels and pack them.

A Triton tensor has one row of each tile; the rows of a tile, and the words they are packed into, are unrolled in the
source. So shifts and distances in memory are constants, and the words stay in a thread's registers.
"""

import triton
import triton.language as tl

from horovod_quant.kernels.triton.columns import MIRROR, NORMS, SOURCE, TARGET
from horovod_quant.kernels.triton.elements import (
    ABS,
    ONE_BITS,
    ROW,
    TILE,
    float_pointer,
    hash32,
    hash_key,
    inverse_norms,
    program_of,
)
from horovod_quant.kernels.triton.tiles import (
    of_rows,
    read_norms,
    read_tiles,
    rows_offsets,
    tiles_offsets,
    words_of_a_tile,
    write_codes,
)


@triton.jit
def encode_sum(
    table, owners,
    KIND: tl.constexpr, BUCKET: tl.constexpr,
    LIMIT: tl.constexpr, FRACTION: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Round to uniform levels, as signed digits to be added.

    ``TILES`` tiles of `words_of_a_tile` per program.
    """
    WORDS: tl.constexpr = words_of_a_tile(WIDTH)
    SIZE: tl.constexpr = WORDS * (32 // WIDTH) * ROW
    row, block, left = program_of(table, owners, TILES * SIZE)
    first = block * (TILES * SIZE)
    source = float_pointer(tl.load(row + SOURCE), KIND) + first
    x = read_tiles(source, left, KIND, TILES, VALUES=True, SIZE=SIZE)
    inverse = _inverses(row, first, left, BUCKET, LIMIT, TILES, SIZE)
    random = hash32(tiles_offsets(TILES, SIZE) + rows_offsets(), *hash_key(row, first))
    digits = uniform_digits(x, inverse, random, LIMIT, FRACTION).to(tl.uint32, bitcast=True)
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.uint32)) + block * (TILES * WORDS * ROW)
    _write_sum(target, digits, left, WIDTH, TILES)


@triton.jit
def _write_sum(target, digits, left, WIDTH: tl.constexpr, TILES: tl.constexpr):
    """Pack the digits of each word's rows into its fields by addition."""
    FIELDS: tl.constexpr = 32 // WIDTH
    WORDS: tl.constexpr = words_of_a_tile(WIDTH)
    number = tl.arange(0, 32)[None, :, None]
    parts = digits << (number % FIELDS * WIDTH).to(tl.uint32)
    if WORDS * FIELDS == 32:
        tile = tl.arange(0, TILES)[:, None, None]
        lane = tl.arange(0, ROW)[None, None, :]
        word = tile * WORDS + tl.arange(0, WORDS)[None, :, None]
        words = tl.sum(tl.reshape(parts, [TILES, WORDS, FIELDS, ROW]), axis=2)
        used = tl.broadcast_to(word * (FIELDS * ROW) < left, [TILES, WORDS, ROW])
        tl.store(target + (word * ROW + lane), words, mask=used)
    else:
        tile = tl.arange(0, TILES)[:, None]
        lane = tl.arange(0, ROW)[None, :]
        for index in tl.static_range(WORDS):
            words = tl.sum(tl.where(number // FIELDS == index, parts, 0), axis=1)
            word = tile * WORDS + index
            used = tl.broadcast_to(word * (FIELDS * ROW) < left, [TILES, ROW])
            tl.store(target + (word * ROW + lane), words, mask=used)


@triton.jit
def encode_codes(
    table, owners,
    KIND: tl.constexpr, BUCKET: tl.constexpr, EXPONENTIAL: tl.constexpr,
    LIMIT: tl.constexpr, FRACTION: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Round to uniform or exponential levels, as sign-and-magnitude codes.

    ``TILES`` tiles per program.
    """
    COUNT: tl.constexpr = TILES * 32 * ROW
    row, block, left = program_of(table, owners, COUNT)
    first = block * COUNT
    source = float_pointer(tl.load(row + SOURCE), KIND) + first
    x = read_tiles(source, left, KIND, TILES, VALUES=not EXPONENTIAL)
    inverse = _inverses(row, first, left, BUCKET, LIMIT, TILES)
    random = hash32(tiles_offsets(TILES) + rows_offsets(), *hash_key(row, first))
    if EXPONENTIAL:
        codes = exponential_codes(x, inverse, random, tl.load(row + MIRROR).to(tl.uint32), BITS)
    else:
        codes = codes_of_digits(uniform_digits(x, inverse, random, LIMIT, FRACTION), BITS)
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.uint32)) + block * (TILES * BITS * ROW)
    write_codes(target, codes, ((left + (ROW - 1)) // ROW * BITS + 31) // 32, BITS, TILES)


@triton.jit
def _inverses(
    row, first, left, BUCKET: tl.constexpr, NUMERATOR: tl.constexpr, TILES: tl.constexpr, SIZE: tl.constexpr = TILE
):  # fmt: skip
    """Return the inverse norms of a program's rows, ``[TILES, 32, 32]``."""
    norms = tl.load(row + NORMS).to(tl.pointer_type(tl.float32))
    return of_rows(inverse_norms(read_norms(norms, first, left, BUCKET, TILES, SIZE), NUMERATOR))


@triton.jit
def uniform_digits(x, inverse, h, LIMIT: tl.constexpr, FRACTION: tl.constexpr):
    y = x * inverse
    y = tl.where(y < LIMIT, y, LIMIT)
    y = tl.where(y > -LIMIT, y, -LIMIT)
    return (y.to(tl.int32) + (h >> (32 - FRACTION)).to(tl.int32)) >> FRACTION


@triton.jit
def codes_of_digits(digits, BITS: tl.constexpr):
    """Return sign-and-magnitude codes."""
    sign = (digits >> (32 - BITS)) & 2 ** (BITS - 1)
    return (tl.abs(digits) | sign).to(tl.uint32)


@triton.jit
def exponential_codes(x, inverse, h, mirror, BITS: tl.constexpr):
    TOP: tl.constexpr = 2 ** (BITS - 1) - 1
    SMALLEST: tl.constexpr = (128 - TOP) << 23
    STEPS: tl.constexpr = 2.0 ** (TOP - 1 + 24)
    y = (x * inverse).to(tl.int32, bitcast=True)
    h = h ^ ((y >> 31).to(tl.uint32) & mirror)
    magnitude = tl.minimum(y & ABS, ONE_BITS)
    index = ((magnitude + (h >> 9).to(tl.int32)) >> 23) - (127 - TOP)
    if TOP < 127:
        value = tl.minimum(magnitude, SMALLEST).to(tl.float32, bitcast=True)
        small = ((value * STEPS).to(tl.int32) + (h >> 8).to(tl.int32)) >> 24
        index = tl.where(magnitude < SMALLEST, small, index)
    # Infinity times zero is minus NaN on the CPU, which the reference defines.
    negative = (x.to(tl.int32, bitcast=True) < 0) | ((x == float("inf")) & (inverse == 0.0))
    return (index | tl.where(negative & (index > 0), 2 ** (BITS - 1), 0)).to(tl.uint32)
