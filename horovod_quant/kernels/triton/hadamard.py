"""Buckets in registers: signs and Walsh-Hadamard transforms for the kernels of rotations.

A bucket is 32 rows of 32 elements. A tuple of 32 tensors ``[TILES, 32]``, one a row, holds ``TILES`` buckets. With as
many warps a program Triton gives each element of such a tensor a thread: a warp has a bucket, and its thread i element
i of each row. Butterflies of rows are then a thread's own, those of elements in a row are exchanges in the warp, and
so is the tree of a sum over the 32 lanes. Other numbers of warps are slower; the bits are the same.
"""

import triton
import triton.language as tl

from horovod_quant.kernels.triton.elements import ROW, TILE, hash32

ROWS = tl.constexpr(TILE.value // ROW.value)


@triton.constexpr_function
def _low_columns(distance):
    """A word with the bits whose numbers do not have the bit ``distance``."""
    return sum(1 << number for number in range(32) if not number & distance)


@triton.jit
def exchanged(x, DISTANCE: tl.constexpr):
    """Of each element the one of its row whose number differs in the bit ``DISTANCE``."""
    partner = (tl.arange(0, ROW) ^ DISTANCE)[None, :]
    return tl.gather(x, tl.broadcast_to(partner, x.shape), axis=1)


@triton.jit
def looked_up(values, index):
    """The element ``index`` of a row of 32 values."""
    return tl.gather(values, index.to(tl.int32), axis=1)


@triton.jit
def sum_over_lanes(lanes):
    """Of each row of 32, in a tree that adds halves: each element has the sum."""
    lanes = lanes + exchanged(lanes, 16)
    lanes = lanes + exchanged(lanes, 8)
    lanes = lanes + exchanged(lanes, 4)
    lanes = lanes + exchanged(lanes, 2)
    return lanes + exchanged(lanes, 1)


@triton.jit
def random_signs(NUMBER: tl.constexpr, k0, k1, factor, addend, flip, TILES: tl.constexpr):
    """The random signs of the first or the second round: bit r of an element's word negates that of row r.

    A row's hash has the bits of its elements. Thread r makes that of row r, and the warp transposes them.
    """
    lane = tl.arange(0, ROW)[None, :]
    rows = tl.arange(0, TILES)[:, None] * ROWS + lane
    words = hash32(2 * rows + NUMBER, k0, k1, factor, addend, flip)
    words = _blocks_swapped(words, 16)
    words = _blocks_swapped(words, 8)
    words = _blocks_swapped(words, 4)
    words = _blocks_swapped(words, 2)
    return _blocks_swapped(words, 1)


@triton.jit
def _blocks_swapped(words, DISTANCE: tl.constexpr):
    """A step of a transposition: blocks of bits off the diagonal change places with those of other threads."""
    LOW: tl.constexpr = _low_columns(DISTANCE)
    HIGH: tl.constexpr = LOW ^ 0xFFFFFFFF
    other = exchanged(words, DISTANCE)
    lower = (words & LOW) | ((other & LOW) << DISTANCE)
    upper = (words & HIGH) | ((other & HIGH) >> DISTANCE)
    return tl.where(((tl.arange(0, ROW) & DISTANCE) == 0)[None, :], lower, upper)


@triton.jit
def signed(x, signs):
    """Elements by row, negated where `random_signs` says so."""
    found = ()
    for row in tl.static_range(ROWS):
        bits = x[row].to(tl.uint32, bitcast=True) ^ ((signs << (31 - row)) & 0x80000000)
        found = found + (bits.to(tl.float32, bitcast=True),)
    return found


@triton.jit
def transformed(x, sizes, WHOLE: tl.constexpr):
    """The Walsh-Hadamard transform of buckets of ``sizes`` coordinates, powers of two from 32 on; the others are 0.

    A sum within a row is ``(a + b, a - b)`` by one rounding: times 1 or -1, plus the other one.
    """
    for stage in tl.static_range(5):
        upper = ((tl.arange(0, ROW) & 2**stage) != 0)[None, :]
        sign = tl.broadcast_to(tl.where(upper, -1.0, 1.0), x[0].shape)
        found = ()
        for row in tl.static_range(ROWS):
            found = found + (tl.fma(x[row], sign, exchanged(x[row], 2**stage)),)
        x = found
    for stage in tl.static_range(5):
        takes_part = sizes > ROW * 2**stage
        found = ()
        for row in tl.static_range(ROWS):
            if row & 2**stage:
                own = x[row - 2**stage] - x[row]
            else:
                own = x[row] + x[row + 2**stage]
            if not WHOLE:
                own = tl.where(takes_part, own, x[row])
            found = found + (own,)
        x = found
    return x


@triton.jit
def coordinates(left):
    """How many a program's elements have: a bucket that is not whole has a power of two, 32 at least."""
    rest = left % TILE
    size = tl.where(rest > 0, ROW, 0)
    for stage in tl.static_range(5, 10):
        size = tl.where(rest > 2**stage, 2 ** (stage + 1), size)
    return left - rest + size


@triton.jit
def sizes_of(count, TILES: tl.constexpr):
    """The number of coordinates of each of a program's buckets, which have ``count``."""
    tile = tl.arange(0, TILES)[:, None]
    return tl.where(tile < count // TILE, TILE, tl.where(tile == count // TILE, count % TILE, 0))
