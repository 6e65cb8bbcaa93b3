"""Kernels that unpack what was sent, and write its values.

A tensor of Triton's has one row of each tile, as in `encoding`: a word is loaded once, and its codes become rows.
"""

# mypy: disable-error-code="assignment"
# Tuples of tensors grow in unrolled loops.

import triton
import triton.language as tl

from horovod_quant.kernels.triton.columns import FACTOR, NORMS, POINTERS, SOURCE, TARGET
from horovod_quant.kernels.triton.elements import (
    ROW,
    below,
    decoding_scales,
    elements_left,
    float_bits,
    float_pointer,
    place,
    rows_alike,
    unpacked,
    words_of_a_tile,
    write,
)

_UNROLLED = tl.constexpr(8)  # workers whose words are all loaded before the first is used


@triton.jit
def decode_sum(
    table, owners,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr,
    LEVELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Sums of signed digits of ``WIDTH`` bits. A program takes ``TILES`` tiles of `words_of_a_tile`."""
    COUNT: tl.constexpr = TILES * words_of_a_tile(WIDTH) * (32 // WIDTH) * ROW
    row, block = place(table, owners)
    left = elements_left(row, block * COUNT, COUNT)
    if left == COUNT:
        _decode_sum(row, block, left, KIND, ALIGNED, BUCKET, LEVELS, WIDTH, BIAS, TILES, WHOLE=True)
    else:
        _decode_sum(row, block, left, KIND, ALIGNED, BUCKET, LEVELS, WIDTH, BIAS, TILES, WHOLE=False)


@triton.jit
def _decode_sum(
    row, block, left,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr,
    LEVELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, TILES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    FIELDS: tl.constexpr = 32 // WIDTH
    WORDS: tl.constexpr = words_of_a_tile(WIDTH)
    ALIKE: tl.constexpr = rows_alike(BUCKET, WORDS * FIELDS)
    first = block * (TILES * WORDS * FIELDS * ROW)
    first_row = (first // ROW).to(tl.int32)
    norms = tl.load(row + NORMS).to(tl.pointer_type(tl.float32))
    factor = float_bits(tl.load(row + FACTOR))
    tile = tl.arange(0, TILES)[:, None]
    lane = tl.arange(0, ROW)[None, :]
    offsets = tile * (WORDS * FIELDS * ROW) + lane
    source = tl.load(row + SOURCE).to(tl.pointer_type(tl.uint32)) + block * (TILES * WORDS * ROW)
    source = source + (tile * (WORDS * ROW) + lane)
    every = ()
    for word in tl.static_range(WORDS):
        is_there = below(offsets - lane + word * (FIELDS * ROW), left, WHOLE)
        every = every + (tl.load(source + word * ROW, mask=is_there, other=0) + BIAS,)
    target = float_pointer(tl.load(row + TARGET), KIND, ALIGNED) + first + offsets
    for number in tl.static_range(WORDS * FIELDS):
        if number % ALIKE == 0:
            own = tile * (WORDS * FIELDS) + number
            scales = _scales(norms, first_row, own, left, factor, BUCKET, LEVELS, WHOLE)
        fields = (every[number // FIELDS] >> (WIDTH * (number % FIELDS))) & (2**WIDTH - 1)
        digits = fields.to(tl.int32) - 2 ** (WIDTH - 1)
        inside = below(offsets + number * ROW, left, WHOLE)
        write(target, number * ROW, digits.to(tl.float32) * scales, inside, KIND)


@triton.jit
def decode_codes(
    table, owners,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr, EXPONENTIAL: tl.constexpr,
    LEVELS: tl.constexpr, BITS: tl.constexpr, WORKERS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The sum of the workers' codes, each with its own norms. A program takes ``TILES`` tiles.

    The list of pointers holds each worker's words and norms.
    """
    COUNT: tl.constexpr = TILES * 32 * ROW
    row, block = place(table, owners)
    left = elements_left(row, block * COUNT, COUNT)
    if left == COUNT:
        _decode_codes(
            table, row, block, left, KIND, ALIGNED, BUCKET, EXPONENTIAL, LEVELS, BITS, WORKERS, TILES, WHOLE=True
        )  # fmt: skip
    else:
        _decode_codes(
            table, row, block, left, KIND, ALIGNED, BUCKET, EXPONENTIAL, LEVELS, BITS, WORKERS, TILES, WHOLE=False
        )  # fmt: skip


@triton.jit
def _decode_codes(
    table, row, block, left,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr, EXPONENTIAL: tl.constexpr,
    LEVELS: tl.constexpr, BITS: tl.constexpr, WORKERS: tl.constexpr, TILES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    factor = float_bits(tl.load(row + FACTOR))
    pointers = table + tl.load(row + POINTERS)
    totals = _workers_values(pointers, block, left, factor, BUCKET, EXPONENTIAL, LEVELS, BITS, TILES, WHOLE)
    if WORKERS <= _UNROLLED:
        for worker in tl.static_range(1, WORKERS):
            values = _workers_values(
                pointers + 2 * worker, block, left, factor, BUCKET, EXPONENTIAL, LEVELS, BITS, TILES, WHOLE
            )  # fmt: skip
            totals = _added(totals, values)
    else:
        for worker in range(1, WORKERS):
            values = _workers_values(
                pointers + 2 * worker, block, left, factor, BUCKET, EXPONENTIAL, LEVELS, BITS, TILES, WHOLE
            )  # fmt: skip
            totals = _added(totals, values)
    first = block * (TILES * 32 * ROW)
    offsets = tl.arange(0, TILES)[:, None] * (32 * ROW) + tl.arange(0, ROW)[None, :]
    target = float_pointer(tl.load(row + TARGET), KIND, ALIGNED) + first + offsets
    for number in tl.static_range(32):
        write(target, number * ROW, totals[number], below(offsets + number * ROW, left, WHOLE), KIND)


@triton.jit
def _added(totals, values):
    sums = ()
    for number in tl.static_range(32):
        sums = sums + (totals[number] + values[number],)
    return sums


@triton.jit
def _workers_values(
    pointers, block, left, factor,
    BUCKET: tl.constexpr, EXPONENTIAL: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """One worker's values of a program's tiles, by row."""
    ALIKE: tl.constexpr = rows_alike(BUCKET, 32)
    norms = tl.load(pointers + 1).to(tl.pointer_type(tl.float32))
    word_rows = ((left + (ROW - 1)) // ROW * BITS + 31) // 32
    codes = tiles_codes(tl.load(pointers), block, word_rows, BITS, TILES, WHOLE)
    tile = tl.arange(0, TILES)[:, None]
    first_row = (block * (TILES * 32)).to(tl.int32)
    found = ()
    for number in tl.static_range(32):
        if number % ALIKE == 0:
            scales = _scales(norms, first_row, tile * 32 + number, left, factor, BUCKET, LEVELS, WHOLE)
        digits = _digits(codes[number], BITS)
        if EXPONENTIAL:
            values = _exponential_values(digits, BITS)
        else:
            values = digits.to(tl.float32)
        found = found + (values * scales,)
    return found


@triton.jit
def _scales(
    norms, first_row, own, left, factor,
    BUCKET: tl.constexpr, LEVELS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The value of a level in each of the rows ``own`` of a program whose first row is ``first_row``."""
    buckets = (first_row + own) // (BUCKET // ROW)
    own_norms = tl.load(norms + buckets, mask=below(own * ROW, left, WHOLE), other=0.0)
    return decoding_scales(own_norms, factor, LEVELS)


@triton.jit
def tiles_codes(address, block, word_rows, BITS: tl.constexpr, TILES: tl.constexpr):
    """The codes of a program's tiles by row, uint32, from dense streams of bits, one a lane.

    The program has ``word_rows`` rows of words.
    """
    tile = tl.arange(0, TILES)[:, None]
    at = tile * (BITS * ROW) + tl.arange(0, ROW)[None, :]
    source = address.to(tl.pointer_type(tl.uint32)) + block * (TILES * BITS * ROW) + at
    words = ()
    for number in tl.static_range(BITS):
        is_there = tl.broadcast_to(tile * BITS + number < word_rows, [TILES, ROW])
        words = words + (tl.load(source + number * ROW, mask=is_there, other=0),)
    return unpacked(words, TILES, BITS)


@triton.jit
def _digits(codes, BITS: tl.constexpr):
    magnitude = (codes & (2 ** (BITS - 1) - 1)).to(tl.int32)
    return tl.where((codes >> (BITS - 1)) != 0, -magnitude, magnitude)


@triton.jit
def _exponential_values(digits, BITS: tl.constexpr):
    TOP: tl.constexpr = 2 ** (BITS - 1) - 1
    index = tl.abs(digits)
    magnitude = tl.where(index > 0, (index + (127 - TOP)) << 23, 0)
    sign = (digits < 0).to(tl.uint32) << 31
    return (magnitude.to(tl.uint32) | sign).to(tl.float32, bitcast=True)
