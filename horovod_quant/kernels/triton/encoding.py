"""Kernels that round elements to levels and pack them.

A tensor of Triton's has one row of each tile; the rows of a tile, and the words they go to, follow one another in the
source. So shifts and distances in memory are constants, and the words stay in a thread's registers.
"""

import triton
import triton.language as tl

from horovod_quant.kernels.triton.columns import MIRROR, NORMS, SOURCE, TARGET
from horovod_quant.kernels.triton.elements import (
    ABS,
    ONE_BITS,
    ROW,
    below,
    elements_left,
    float_pointer,
    hash_input,
    hash_key,
    hash_of,
    hash_step,
    inverse_norms,
    place,
    read,
    read_values,
    rows_alike,
    words_of_a_tile,
)


@triton.jit
def encode_sum(
    table, owners,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr,
    LIMIT: tl.constexpr, FRACTION: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Uniform levels, as signed digits to be added. A program takes ``TILES`` tiles of `words_of_a_tile`."""
    COUNT: tl.constexpr = TILES * words_of_a_tile(WIDTH) * (32 // WIDTH) * ROW
    row, block = place(table, owners)
    left = elements_left(row, block * COUNT, COUNT)
    if left == COUNT:
        _encode_sum(row, block, left, KIND, ALIGNED, BUCKET, LIMIT, FRACTION, WIDTH, TILES, WHOLE=True)
    else:
        _encode_sum(row, block, left, KIND, ALIGNED, BUCKET, LIMIT, FRACTION, WIDTH, TILES, WHOLE=False)


@triton.jit
def _encode_sum(
    row, block, left,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr,
    LIMIT: tl.constexpr, FRACTION: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    FIELDS: tl.constexpr = 32 // WIDTH
    WORDS: tl.constexpr = words_of_a_tile(WIDTH)
    ALIKE: tl.constexpr = rows_alike(BUCKET, WORDS * FIELDS)
    first = block * (TILES * WORDS * FIELDS * ROW)
    norms = tl.load(row + NORMS).to(tl.pointer_type(tl.float32))
    k0, k1, factor, addend, flip = hash_key(row, first)
    first_row = (first // ROW).to(tl.int32)
    tile = tl.arange(0, TILES)[:, None]
    lane = tl.arange(0, ROW)[None, :]
    offsets = tile * (WORDS * FIELDS * ROW) + lane
    source = float_pointer(tl.load(row + SOURCE), KIND, ALIGNED) + first + offsets
    h = hash_input(offsets, k0)
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.uint32)) + block * (TILES * WORDS * ROW)
    target = target + (tile * (WORDS * ROW) + lane)
    words = tl.zeros([TILES, ROW], tl.uint32)
    for number in tl.static_range(WORDS * FIELDS):
        if number % ALIKE == 0:
            own = tile * (WORDS * FIELDS) + number
            inverse = _inverses(norms, first_row, own, left, BUCKET, LIMIT, WHOLE)
        x = read_values(source, number * ROW, below(offsets + number * ROW, left, WHOLE), KIND)
        random = hash_of(h + hash_step(number * ROW), k1, factor, addend, flip)
        digits = uniform_digits(x, inverse, random, LIMIT, FRACTION)
        words = words + (digits.to(tl.uint32, bitcast=True) << (WIDTH * (number % FIELDS)))
        if number % FIELDS == FIELDS - 1:
            used = below(offsets - lane + (number - FIELDS + 1) * ROW, left, WHOLE)
            tl.store(target + number // FIELDS * ROW, words, mask=used)
            words = tl.zeros([TILES, ROW], tl.uint32)


@triton.jit
def encode_codes(
    table, owners,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr, EXPONENTIAL: tl.constexpr,
    LIMIT: tl.constexpr, FRACTION: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Uniform or exponential levels, as codes of a sign and a magnitude. A program takes ``TILES`` tiles."""
    COUNT: tl.constexpr = TILES * 32 * ROW
    row, block = place(table, owners)
    left = elements_left(row, block * COUNT, COUNT)
    if left == COUNT:
        _encode_codes(
            row, block, left, KIND, ALIGNED, BUCKET, EXPONENTIAL, LIMIT, FRACTION, BITS, TILES, WHOLE=True
        )  # fmt: skip
    else:
        _encode_codes(
            row, block, left, KIND, ALIGNED, BUCKET, EXPONENTIAL, LIMIT, FRACTION, BITS, TILES, WHOLE=False
        )  # fmt: skip


@triton.jit
def _encode_codes(
    row, block, left,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr, EXPONENTIAL: tl.constexpr,
    LIMIT: tl.constexpr, FRACTION: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    ALIKE: tl.constexpr = rows_alike(BUCKET, 32)
    first = block * (TILES * 32 * ROW)
    norms = tl.load(row + NORMS).to(tl.pointer_type(tl.float32))
    mirror = tl.load(row + MIRROR).to(tl.uint32)
    word_rows = ((left + (ROW - 1)) // ROW * BITS + 31) // 32
    k0, k1, factor, addend, flip = hash_key(row, first)
    first_row = (first // ROW).to(tl.int32)
    tile = tl.arange(0, TILES)[:, None]
    lane = tl.arange(0, ROW)[None, :]
    offsets = tile * (32 * ROW) + lane
    source = float_pointer(tl.load(row + SOURCE), KIND, ALIGNED) + first + offsets
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.uint32)) + block * (TILES * BITS * ROW)
    target = target + (tile * (BITS * ROW) + lane)
    h = hash_input(offsets, k0)
    words = tl.zeros([TILES, ROW], tl.uint32)
    for number in tl.static_range(32):
        if number % ALIKE == 0:
            inverse = _inverses(norms, first_row, tile * 32 + number, left, BUCKET, LIMIT, WHOLE)
        inside = below(offsets + number * ROW, left, WHOLE)
        random = hash_of(h + hash_step(number * ROW), k1, factor, addend, flip)
        if EXPONENTIAL:
            x = read(source, number * ROW, inside, KIND)
            codes = exponential_codes(x, inverse, random, mirror, BITS)
        else:
            x = read_values(source, number * ROW, inside, KIND)
            codes = codes_of_digits(uniform_digits(x, inverse, random, LIMIT, FRACTION), BITS)
        words = words | (codes << (number * BITS % 32))
        if number * BITS % 32 + BITS >= 32:
            used = below(tile * BITS + number * BITS // 32, word_rows, WHOLE)
            tl.store(target + number * BITS // 32 * ROW, words, mask=tl.broadcast_to(used, words.shape))
            if number * BITS % 32 + BITS > 32:
                words = codes >> (32 - number * BITS % 32)
            else:
                words = tl.zeros([TILES, ROW], tl.uint32)


@triton.jit
def _inverses(
    norms, first_row, own, left, BUCKET: tl.constexpr, NUMERATOR: tl.constexpr, WHOLE: tl.constexpr
):
    """The inverse norm of each of the rows ``own`` of a program whose first row is ``first_row``."""
    buckets = (first_row + own) // (BUCKET // ROW)
    return inverse_norms(tl.load(norms + buckets, mask=below(own * ROW, left, WHOLE), other=0.0), NUMERATOR)


@triton.jit
def uniform_digits(x, inverse, h, LIMIT: tl.constexpr, FRACTION: tl.constexpr):
    y = x * inverse
    y = tl.where(y < LIMIT, y, LIMIT)
    y = tl.where(y > -LIMIT, y, -LIMIT)
    return (y.to(tl.int32) + (h >> (32 - FRACTION)).to(tl.int32)) >> FRACTION


@triton.jit
def codes_of_digits(digits, BITS: tl.constexpr):
    """Signs and magnitudes."""
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
    # Infinity times zero is minus NaN on the reference's processor.
    negative = (x.to(tl.int32, bitcast=True) < 0) | ((x == float("inf")) & (inverse == 0.0))
    return (index | tl.where(negative & (index > 0), 2 ** (BITS - 1), 0)).to(tl.uint32)
