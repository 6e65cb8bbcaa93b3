"""Kernels that round elements to levels and pack them."""

import triton
import triton.language as tl

from horovod_quant.kernels.triton.columns import MIRROR, NORMS, SOURCE, TARGET
from horovod_quant.kernels.triton.elements import (
    ABS,
    INF_BITS,
    ONE_BITS,
    ROW,
    below,
    elements_left,
    float_pointer,
    hash32,
    hash_key,
    inverse_norms,
    place,
    read,
)


@triton.jit
def encode_sum(
    table, owners,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr,
    LIMIT: tl.constexpr, FRACTION: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Uniform levels, as signed digits to be added. A program makes ``TILES`` rows of words."""
    COUNT: tl.constexpr = TILES * (32 // WIDTH) * ROW
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
    first = block * (TILES * FIELDS * ROW)
    source = float_pointer(tl.load(row + SOURCE), KIND, ALIGNED) + first
    norms = tl.load(row + NORMS).to(tl.pointer_type(tl.float32))
    k0, k1, shift, addend, flip = hash_key(row, first)
    first_row = (first // ROW).to(tl.int32)
    tile = tl.arange(0, TILES)
    lane = tl.arange(0, ROW)
    words = tl.zeros([TILES, ROW], tl.uint32)
    for field in tl.static_range(FIELDS):
        own = tile * FIELDS + field
        inverse = _inverses(norms, first_row, own, left, BUCKET, LIMIT, WHOLE)
        offsets = own[:, None] * ROW + lane[None, :]
        x = read(source, offsets, below(offsets, left, WHOLE), KIND)
        digits = uniform_digits(x, inverse, hash32(offsets, k0, k1, shift, addend, flip), LIMIT, FRACTION)
        words = words + (digits.to(tl.uint32, bitcast=True) << (WIDTH * field))
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.uint32)) + block * (TILES * ROW)
    used = below(tile * (FIELDS * ROW), left, WHOLE)
    tl.store(target + (tile[:, None] * ROW + lane[None, :]), words, mask=used[:, None])


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
    first = block * (TILES * 32 * ROW)
    source = float_pointer(tl.load(row + SOURCE), KIND, ALIGNED) + first
    norms = tl.load(row + NORMS).to(tl.pointer_type(tl.float32))
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.uint32)) + block * (TILES * BITS * ROW)
    mirror = tl.load(row + MIRROR).to(tl.uint32)
    word_rows = ((left + (ROW - 1)) // ROW * BITS + 31) // 32
    k0, k1, shift, addend, flip = hash_key(row, first)
    first_row = (first // ROW).to(tl.int32)
    tile = tl.arange(0, TILES)
    lane = tl.arange(0, ROW)
    words = tl.zeros([TILES, ROW], tl.uint32)
    for number in tl.static_range(32):
        own = tile * 32 + number
        inverse = _inverses(norms, first_row, own, left, BUCKET, LIMIT, WHOLE)
        offsets = own[:, None] * ROW + lane[None, :]
        x = read(source, offsets, below(offsets, left, WHOLE), KIND)
        h = hash32(offsets, k0, k1, shift, addend, flip)
        if EXPONENTIAL:
            digits = exponential_digits(x, inverse, h, mirror, BITS)
        else:
            digits = uniform_digits(x, inverse, h, LIMIT, FRACTION)
        sign = (digits < 0).to(tl.uint32) << (BITS - 1)
        codes = tl.abs(digits).to(tl.uint32) | sign
        words = words | (codes << (number * BITS % 32))
        if number * BITS % 32 + BITS >= 32:
            word = tile * BITS + number * BITS // 32
            used = below(word, word_rows, WHOLE)
            tl.store(target + (word[:, None] * ROW + lane[None, :]), words, mask=used[:, None])
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
    own_norms = tl.load(norms + buckets, mask=below(own * ROW, left, WHOLE), other=0.0)
    return inverse_norms(own_norms, NUMERATOR)[:, None]


@triton.jit
def uniform_digits(x, inverse, h, LIMIT: tl.constexpr, FRACTION: tl.constexpr):
    y = x * inverse
    y = tl.where(y < LIMIT, y, LIMIT)
    y = tl.where(y > -LIMIT, y, -LIMIT)
    return (y.to(tl.int32) + (h >> (32 - FRACTION)).to(tl.int32)) >> FRACTION


@triton.jit
def exponential_digits(x, inverse, h, mirror, BITS: tl.constexpr):
    TOP: tl.constexpr = 2 ** (BITS - 1) - 1
    SMALLEST: tl.constexpr = (128 - TOP) << 23
    STEPS: tl.constexpr = 2.0 ** (TOP - 1 + 24)
    y = (x * inverse).to(tl.int32, bitcast=True)
    h = tl.where(y < 0, h ^ mirror, h)
    magnitude = tl.minimum(y & ABS, ONE_BITS)
    index = ((magnitude + (h >> 9).to(tl.int32)) >> 23) - (127 - TOP)
    if TOP < 127:
        value = tl.minimum(magnitude, SMALLEST).to(tl.float32, bitcast=True)
        small = ((value * STEPS).to(tl.int32) + (h >> 8).to(tl.int32)) >> 24
        index = tl.where(magnitude < SMALLEST, small, index)
    bits = x.to(tl.int32, bitcast=True)
    # Infinity times zero is minus NaN on the reference's processor.
    negative = (bits < 0) | (((bits & ABS) == INF_BITS) & (inverse == 0.0))
    return tl.where(negative, -index, index)
