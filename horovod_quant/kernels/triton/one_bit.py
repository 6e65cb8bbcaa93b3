"""Kernels of BinSGDM's 1-bit allreduce, which draw, count, redraw and decode bits."""

# mypy: disable-error-code="assignment"
# Tuples of tensors grow in unrolled loops.

import triton
import triton.language as tl

from horovod_quant.kernels.triton.columns import (
    BROKEN,
    FACTOR,
    MOMENTUM,
    POINTERS,
    SCALE,
    SECOND_FACTOR,
    SOURCE,
    TARGET,
)
from horovod_quant.kernels.triton.elements import (
    ABS,
    INF_BITS,
    ROW,
    TILE,
    below,
    float_bits,
    float_pointer,
    hash32,
    hash_input,
    hash_key,
    hash_of,
    hash_step,
    program_of,
    read,
    write,
)
from horovod_quant.kernels.triton.tiles import rows_offsets, tiles_offsets

_TINY = tl.constexpr(2.0**-126)
_STEP = tl.constexpr(2.0**-23)
_UNROLLED = tl.constexpr(8)  # workers whose words are loaded before the first is used


@triton.jit
def binarize(table, owners, KIND: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr):
    """Update momentum and scale in place, and draw a bit per element.

    ``TILES`` tiles per program.
    """
    row, block, left = program_of(table, owners, TILES * TILE)
    if left == TILES * TILE:
        _binarize(row, block, left, KIND, ALIGNED, TILES, WHOLE=True)
    else:
        _binarize(row, block, left, KIND, ALIGNED, TILES, WHOLE=False)


@triton.jit
def _binarize(
    row, block, left, KIND: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr
):
    first = block * (TILES * TILE)
    offsets = tiles_offsets(TILES) + rows_offsets()
    inside = below(offsets, left, WHOLE)
    gradient = read(float_pointer(tl.load(row + SOURCE), KIND, ALIGNED) + first, offsets, inside, KIND)
    momentum_at = float_pointer(tl.load(row + MOMENTUM), "float32", ALIGNED) + first
    scale_at = float_pointer(tl.load(row + SCALE), "float32", ALIGNED) + first
    momentum = tl.load(momentum_at + offsets, mask=inside, other=0.0)
    scale = tl.load(scale_at + offsets, mask=inside, other=0.0)

    magnitude = gradient.to(tl.int32, bitcast=True) & ABS
    largest = tl.max(tl.max(magnitude, axis=2), axis=1)
    sound = (largest < INF_BITS)[:, None, None]
    keep, take = float_bits(tl.load(row + FACTOR)), float_bits(tl.load(row + SECOND_FACTOR))
    momentum = tl.where(sound, keep * momentum + take * gradient, momentum)
    scale = tl.where(sound, keep * scale + take * magnitude.to(tl.float32, bitcast=True), scale)
    tl.store(momentum_at + offsets, momentum, mask=inside)
    tl.store(scale_at + offsets, scale, mask=inside)

    k0, k1, shift, addend, flip = hash_key(row, first)
    draw = (hash32(offsets, k0, k1, shift, addend, flip).to(tl.int32, bitcast=True) >> 8).to(
        tl.float32
    ) * _STEP
    width = tl.where(scale >= _TINY, scale, 1.0)
    bits = ((draw * width < momentum) & inside).to(tl.int32)
    words = tl.sum(bits << tl.arange(0, 32)[None, :, None], axis=1)
    tile = tl.arange(0, TILES)
    used = below(tile * TILE, left, WHOLE)
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.int32)) + block * (TILES * ROW)
    tl.store(target + (tile[:, None] * ROW + tl.arange(0, ROW)[None, :]), words, mask=used[:, None])
    flags = tl.load(row + BROKEN).to(tl.pointer_type(tl.int8)) + block * TILES
    tl.store(flags + tile, (largest >= INF_BITS).to(tl.int8), mask=used)


@triton.jit
def vote(
    table, owners,
    WORKERS: tl.constexpr, FRACTION: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Draw a bit from the average of the workers' bits.

    The list of pointers has each worker's words. The ones are counted for the 32 bits of a word at once: each bit of
    the counts is a separate word.
    """
    PLACES: tl.constexpr = WORKERS.bit_length()
    row, block, left = program_of(table, owners, TILES * TILE)
    tile = tl.arange(0, TILES)[:, None]
    lane = tl.arange(0, ROW)[None, :]
    inside = tl.broadcast_to(tile * TILE < left, [TILES, ROW])
    at = block * (TILES * ROW) + (tile * ROW + lane)
    pointers = table + tl.load(row + POINTERS)
    ones = ()
    for _ in tl.static_range(PLACES):
        ones = ones + (tl.zeros([TILES, ROW], tl.uint32),)
    if WORKERS <= _UNROLLED:
        for worker in tl.static_range(WORKERS):
            ones = _counted(ones, _words_at(pointers + worker, at, inside), PLACES)
    else:
        for worker in range(WORKERS):
            ones = _counted(ones, _words_at(pointers + worker, at, inside), PLACES)

    k0, k1, factor, addend, flip = hash_key(row, block * (TILES * TILE))
    h = hash_input(tile * TILE + lane, k0)
    bits = tl.zeros([TILES, ROW], tl.uint32)
    for number in tl.static_range(32):
        draw = (hash_of(h + hash_step(number * ROW), k1, factor, addend, flip) >> (32 - FRACTION)) * WORKERS
        count = tl.zeros([TILES, ROW], tl.uint32)
        for bit in tl.static_range(PLACES):
            count = count | (((ones[bit] >> number) & 1) << (FRACTION + bit))
        bits = bits | ((draw < count).to(tl.uint32) << number)
    tl.store(tl.load(row + TARGET).to(tl.pointer_type(tl.uint32)) + at, bits, mask=inside)


@triton.jit
def _words_at(pointer, at, inside):
    return tl.load(tl.load(pointer).to(tl.pointer_type(tl.uint32)) + at, mask=inside, other=0)


@triton.jit
def _counted(ones, carry, PLACES: tl.constexpr):
    """Add the ones of another word to bitwise counts."""
    sums = ()
    for bit in tl.static_range(PLACES):
        sums = sums + (ones[bit] ^ carry,)
        carry = ones[bit] & carry
    return sums


@triton.jit
def decode_signs(
    table, owners,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Write plus or minus the factor; ``ROWS`` rows of elements per program.

    With ``FLAGS`` the tiles whose flag is set in the words ``BROKEN`` become NaN.
    """
    row, block, left = program_of(table, owners, ROWS * ROW)
    if left == ROWS * ROW:
        _decode_signs(row, block, left, KIND, ALIGNED, ROWS, FLAGS, WHOLE=True)
    else:
        _decode_signs(row, block, left, KIND, ALIGNED, ROWS, FLAGS, WHOLE=False)


@triton.jit
def _decode_signs(
    row, block, left,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, FLAGS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    local_rows = tl.arange(0, ROWS)
    offsets = local_rows[:, None] * ROW + tl.arange(0, ROW)[None, :]
    inside = below(offsets, left, WHOLE)
    words = tl.load(row + SOURCE).to(tl.pointer_type(tl.uint32))
    number = (block * ROWS).to(tl.int32) + local_rows
    at = (number >> 5)[:, None] * ROW + tl.arange(0, ROW)[None, :]
    bits = (tl.load(words + at, mask=inside, other=0) >> (number & 31).to(tl.uint32)[:, None]) & 1
    magnitude = tl.load(row + FACTOR).to(tl.uint32)
    values = (magnitude ^ ((bits ^ 1) << 31)).to(tl.float32, bitcast=True)  # -0 is not 0 - 0
    if FLAGS:
        flags = tl.load(row + BROKEN).to(tl.pointer_type(tl.uint32))
        used = below(local_rows * ROW, left, WHOLE)
        flagged = tl.load(flags + (number >> 10), mask=used, other=0) >> ((number >> 5) & 31).to(tl.uint32)
        values = tl.where((flagged & 1)[:, None] != 0, float("nan"), values)
    target = float_pointer(tl.load(row + TARGET), KIND, ALIGNED) + block * (ROWS * ROW)
    write(target, offsets, values, inside, KIND)


@triton.jit
def write_nan_tiles(table, owners, KIND: tl.constexpr):
    """Write NaN to a tile flagged as non-finite; one tile per program."""
    row, block, left = program_of(table, owners, TILE)
    broken = tl.load(tl.load(row + BROKEN).to(tl.pointer_type(tl.int8)) + block) != 0
    offsets = tl.arange(0, TILE)
    target = float_pointer(tl.load(row + TARGET), KIND) + block * TILE
    write(target, offsets, tl.full([TILE], float("nan"), tl.float32), (offsets < left) & broken, KIND)


@triton.jit
def pack_flags(table, owners, WORDS: tl.constexpr):
    """Pack flags as bits, the first flag lowest; ``WORDS`` words per program."""
    row, block, left = program_of(table, owners, WORDS * 32)
    word = tl.arange(0, WORDS)
    number = tl.arange(0, 32)
    offsets = word[:, None] * 32 + number[None, :]
    flags = tl.load(row + SOURCE).to(tl.pointer_type(tl.int8)) + block * (WORDS * 32)
    bits = (tl.load(flags + offsets, mask=offsets < left, other=0) != 0).to(tl.int32)
    words = tl.sum(bits << number[None, :], axis=1)
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.int32)) + block * WORDS
    tl.store(target + word, words, mask=word * 32 < left)
