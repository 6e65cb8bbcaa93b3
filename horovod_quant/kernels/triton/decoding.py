"""Kernels that unpack what was sent, and write its values."""

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
    write,
)


@triton.jit
def decode_sum(
    table, owners,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr,
    LEVELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of signed digits of ``WIDTH`` bits. A program takes ``ROWS`` rows of elements."""
    row, block = place(table, owners)
    left = elements_left(row, block * (ROWS * ROW), ROWS * ROW)
    if left == ROWS * ROW:
        _decode_sum(row, block, left, KIND, ALIGNED, BUCKET, LEVELS, WIDTH, BIAS, ROWS, WHOLE=True)
    else:
        _decode_sum(row, block, left, KIND, ALIGNED, BUCKET, LEVELS, WIDTH, BIAS, ROWS, WHOLE=False)


@triton.jit
def _decode_sum(
    row, block, left,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr,
    LEVELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    FIELDS: tl.constexpr = 32 // WIDTH
    own = tl.arange(0, ROWS)
    lane = tl.arange(0, ROW)
    offsets = own[:, None] * ROW + lane[None, :]
    inside = below(offsets, left, WHOLE)
    number = (block * ROWS).to(tl.int32) + own
    word_row = number // FIELDS
    shift = ((number - word_row * FIELDS) * WIDTH).to(tl.uint32)
    source = tl.load(row + SOURCE).to(tl.pointer_type(tl.uint32))
    words = tl.load(source + (word_row[:, None] * ROW + lane[None, :]), mask=inside, other=0)
    fields = ((words + BIAS) >> shift[:, None]) & (2**WIDTH - 1)
    digits = fields.to(tl.int32) - 2 ** (WIDTH - 1)
    norms = tl.load(row + NORMS).to(tl.pointer_type(tl.float32))
    factor = float_bits(tl.load(row + FACTOR))
    scales = _scales(norms, number, own, left, factor, BUCKET, LEVELS, WHOLE)
    target = float_pointer(tl.load(row + TARGET), KIND, ALIGNED) + block * (ROWS * ROW)
    write(target, offsets, digits.to(tl.float32) * scales, inside, KIND)


@triton.jit
def decode_codes(
    table, owners,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr, EXPONENTIAL: tl.constexpr,
    LEVELS: tl.constexpr, BITS: tl.constexpr, WORKERS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sum of the workers' codes, each with its own norms. A program takes ``ROWS`` rows of elements.

    The list of pointers holds each worker's words and norms.
    """
    row, block = place(table, owners)
    left = elements_left(row, block * (ROWS * ROW), ROWS * ROW)
    if left == ROWS * ROW:
        _decode_codes(
            table, row, block, left, KIND, ALIGNED, BUCKET, EXPONENTIAL, LEVELS, BITS, WORKERS, ROWS, WHOLE=True
        )  # fmt: skip
    else:
        _decode_codes(
            table, row, block, left, KIND, ALIGNED, BUCKET, EXPONENTIAL, LEVELS, BITS, WORKERS, ROWS, WHOLE=False
        )  # fmt: skip


@triton.jit
def _decode_codes(
    table, row, block, left,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr, EXPONENTIAL: tl.constexpr,
    LEVELS: tl.constexpr, BITS: tl.constexpr, WORKERS: tl.constexpr, ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    own = tl.arange(0, ROWS)
    number = (block * ROWS).to(tl.int32) + own
    offsets = own[:, None] * ROW + tl.arange(0, ROW)[None, :]
    factor = float_bits(tl.load(row + FACTOR))
    pointers = table + tl.load(row + POINTERS)
    total = _workers_values(
        pointers, number, offsets, left, factor, BUCKET, EXPONENTIAL, LEVELS, BITS, ROWS, WHOLE
    )  # fmt: skip
    for worker in range(1, WORKERS):
        values = _workers_values(
            pointers + 2 * worker, number, offsets, left, factor, BUCKET, EXPONENTIAL, LEVELS, BITS, ROWS, WHOLE
        )  # fmt: skip
        total = total + values
    target = float_pointer(tl.load(row + TARGET), KIND, ALIGNED) + block * (ROWS * ROW)
    write(target, offsets, total, below(offsets, left, WHOLE), KIND)


@triton.jit
def _workers_values(
    pointers, number, offsets, left, factor,
    BUCKET: tl.constexpr, EXPONENTIAL: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """One worker's values of the elements of the rows ``number``."""
    words = tl.load(pointers).to(tl.pointer_type(tl.uint32))
    norms = tl.load(pointers + 1).to(tl.pointer_type(tl.float32))
    digits = _digits(codes_at(words, number, below(offsets, left, WHOLE), BITS), BITS)
    if EXPONENTIAL:
        values = _exponential_values(digits, BITS)
    else:
        values = digits.to(tl.float32)
    return values * _scales(norms, number, tl.arange(0, ROWS), left, factor, BUCKET, LEVELS, WHOLE)


@triton.jit
def _scales(
    norms, number, own, left, factor,
    BUCKET: tl.constexpr, LEVELS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The value of a level in each of the rows ``number``, which are a program's rows ``own``."""
    has_elements = below(own * ROW, left, WHOLE)
    own_norms = tl.load(norms + number // (BUCKET // ROW), mask=has_elements, other=0.0)
    return decoding_scales(own_norms, factor, LEVELS)[:, None]


@triton.jit
def codes_at(words, number, inside, BITS: tl.constexpr):
    """The codes of the rows ``number``, uint32, from dense streams of bits, one a lane."""
    bit = number * BITS
    shift = (bit & 31).to(tl.uint32)[:, None]
    at = (bit >> 5)[:, None] * ROW + tl.arange(0, ROW)[None, :]
    codes = tl.load(words + at, mask=inside, other=0) >> shift
    if 32 % BITS != 0:
        straddles = inside & (shift + BITS > 32)
        rest = tl.load(words + at + ROW, mask=straddles, other=0)
        codes = codes | (rest << ((32 - shift) & 31))
    return codes & (2**BITS - 1)


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
