"""Kernels that decode payloads.

A Triton tensor has one row of each tile, as in `encoding`: a word is loaded once, and its codes become rows.
"""

import triton
import triton.language as tl

from horovod_quant.kernels.triton.columns import FACTOR, NORMS, POINTERS, SOURCE, TARGET
from horovod_quant.kernels.triton.elements import (
    ROW,
    TILE,
    decoding_scales,
    float_bits,
    float_pointer,
    program_of,
)
from horovod_quant.kernels.triton.tiles import of_rows, read_codes, read_norms, words_of_a_tile, write_tiles

_UNROLLED = tl.constexpr(8)  # workers whose words are loaded before the first is used


@triton.jit
def decode_sum(
    table, owners,
    KIND: tl.constexpr, BUCKET: tl.constexpr,
    LEVELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Decode sums of signed digits of ``WIDTH`` bits.

    ``TILES`` tiles of `words_of_a_tile` per program.
    """
    WORDS: tl.constexpr = words_of_a_tile(WIDTH)
    SIZE: tl.constexpr = WORDS * (32 // WIDTH) * ROW
    row, block, left = program_of(table, owners, TILES * SIZE)
    first = block * (TILES * SIZE)
    norms = tl.load(row + NORMS).to(tl.pointer_type(tl.float32))
    scales = _scales(norms, first, left, float_bits(tl.load(row + FACTOR)), BUCKET, LEVELS, TILES, SIZE)
    source = tl.load(row + SOURCE).to(tl.pointer_type(tl.uint32)) + block * (TILES * WORDS * ROW)
    digits = _read_sum(source, left, BIAS, WIDTH, TILES).to(tl.int32) - 2 ** (WIDTH - 1)
    target = float_pointer(tl.load(row + TARGET), KIND) + first
    write_tiles(target, digits.to(tl.float32) * scales, left, KIND, TILES, SIZE)


@triton.jit
def _read_sum(source, left, BIAS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):
    """Return the fields of a program's words, in rows ``[TILES, 32, 32]``."""
    FIELDS: tl.constexpr = 32 // WIDTH
    WORDS: tl.constexpr = words_of_a_tile(WIDTH)
    number = tl.arange(0, 32)[None, :, None]
    if WORDS * FIELDS == 32:
        word = tl.arange(0, TILES)[:, None, None] * WORDS + tl.arange(0, WORDS)[None, :, None]
        used = tl.broadcast_to(word * (FIELDS * ROW) < left, [TILES, WORDS, ROW])
        at = word * ROW + tl.arange(0, ROW)[None, None, :]
        words = (tl.load(source + at, mask=used, other=0) + BIAS)[:, :, None, :]
        words = tl.reshape(tl.broadcast_to(words, [TILES, WORDS, FIELDS, ROW]), [TILES, 32, ROW])
    else:
        words = tl.zeros([TILES, 32, ROW], tl.uint32)
        for index in tl.static_range(WORDS):
            word = tl.arange(0, TILES)[:, None] * WORDS + index
            used = tl.broadcast_to(word * (FIELDS * ROW) < left, [TILES, ROW])
            at = word * ROW + tl.arange(0, ROW)[None, :]
            one = (tl.load(source + at, mask=used, other=0) + BIAS)[:, None, :]
            words = tl.where(number // FIELDS == index, one, words)
    return (words >> (number % FIELDS * WIDTH).to(tl.uint32)) & (2**WIDTH - 1)


@triton.jit
def decode_codes(
    table, owners,
    KIND: tl.constexpr, BUCKET: tl.constexpr, EXPONENTIAL: tl.constexpr,
    LEVELS: tl.constexpr, BITS: tl.constexpr, WORKERS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Decode the sum of the workers' codes, each with that worker's norms.

    ``TILES`` tiles per program. The list of pointers has each worker's words and norms.
    """
    COUNT: tl.constexpr = TILES * 32 * ROW
    row, block, left = program_of(table, owners, COUNT)
    factor = float_bits(tl.load(row + FACTOR))
    pointers = table + tl.load(row + POINTERS)
    totals = _workers_values(pointers, block, left, factor, BUCKET, EXPONENTIAL, LEVELS, BITS, TILES)
    if WORKERS <= _UNROLLED:
        for worker in tl.static_range(1, WORKERS):
            pair = pointers + 2 * worker
            totals += _workers_values(pair, block, left, factor, BUCKET, EXPONENTIAL, LEVELS, BITS, TILES)
    else:
        for worker in range(1, WORKERS):
            pair = pointers + 2 * worker
            totals += _workers_values(pair, block, left, factor, BUCKET, EXPONENTIAL, LEVELS, BITS, TILES)
    target = float_pointer(tl.load(row + TARGET), KIND) + block * COUNT
    write_tiles(target, totals, left, KIND, TILES)


@triton.jit
def _workers_values(
    pointers, block, left, factor,
    BUCKET: tl.constexpr, EXPONENTIAL: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return one worker's values of a program's elements."""
    source = tl.load(pointers).to(tl.pointer_type(tl.uint32)) + block * (TILES * BITS * ROW)
    codes = read_codes(source, ((left + (ROW - 1)) // ROW * BITS + 31) // 32, BITS, TILES)
    norms = tl.load(pointers + 1).to(tl.pointer_type(tl.float32))
    digits = _digits(codes, BITS)
    if EXPONENTIAL:
        values = _exponential_values(digits, BITS)
    else:
        values = digits.to(tl.float32)
    return values * _scales(norms, block * (TILES * TILE), left, factor, BUCKET, LEVELS, TILES)


@triton.jit
def _scales(
    norms, first, left, factor,
    BUCKET: tl.constexpr, LEVELS: tl.constexpr, TILES: tl.constexpr, SIZE: tl.constexpr = TILE,
):  # fmt: skip
    """Return a level's value in each row, ``[TILES, 32, 32]``."""
    return of_rows(decoding_scales(read_norms(norms, first, left, BUCKET, TILES, SIZE), factor, LEVELS))


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
