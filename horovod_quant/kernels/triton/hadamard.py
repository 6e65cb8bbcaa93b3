"""Buckets in registers: signs and Walsh-Hadamard transforms for the kernels of rotations.

A bucket is 32 rows of 32 elements, and tensors are ``[TILES, 32, 32]`` as in `tiles`. A warp has a bucket, and
a thread an element of each row. Butterflies of rows are then local to a thread, those of elements in a row are warp
shuffles, and so is the tree of a sum over the 32 lanes. A program is one warp: with more, Triton would move
loop-carried values through shared memory. The results are bit-identical.
"""

import triton
import triton.language as tl

from horovod_quant.kernels.triton.elements import ROW, TILE, hash32

ROWS = tl.constexpr(TILE.value // ROW.value)


@triton.constexpr_function
def _low_columns(distance):
    """Return a mask of bits without ``distance`` in their index."""
    return sum(1 << number for number in range(32) if not number & distance)


@triton.jit
def exchanged(x, DISTANCE: tl.constexpr):
    """Exchange elements of a row whose indices differ in one bit.

    The bit is ``DISTANCE``.
    """
    partner = tl.arange(0, ROW) ^ DISTANCE
    if len(x.shape) == 2:
        index = tl.broadcast_to(partner[None, :], x.shape)
    else:
        index = tl.broadcast_to(partner[None, None, :], x.shape)
    return tl.gather(x, index, axis=len(x.shape) - 1)


@triton.jit
def looked_up(values, index):
    """Look up values by index in a row of 32.

    The row is the same for all rows of ``index``.
    """
    return tl.gather(tl.broadcast_to(values[:, None, :], index.shape), index.to(tl.int32), axis=2)


@triton.jit
def lane_sums(terms):
    """Compute `horovod_quant.kernels.rotation.lane_sums`: eight rows in float32, then in float64."""
    TILES: tl.constexpr = terms.shape[0]
    x = tl.permute(tl.reshape(terms, [TILES, 4, 2, 2, 2, ROW]), (0, 5, 1, 2, 3, 4))
    even, odd = tl.split(x)
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    eights = ((((((x0 + x1) + x2) + x3) + x4) + x5) + x6) + x7
    even, odd = tl.split(tl.reshape(eights.to(tl.float64), [TILES, ROW, 2, 2]))
    sum_0, sum_2 = tl.split(even)
    sum_1, sum_3 = tl.split(odd)
    return _sum_over_lanes(((sum_0 + sum_1) + sum_2) + sum_3)


@triton.jit
def _sum_over_lanes(lanes):
    """Return the sum of each row of 32 in each element.

    A tree of additions computes it.
    """
    lanes = lanes + exchanged(lanes, 16)
    lanes = lanes + exchanged(lanes, 8)
    lanes = lanes + exchanged(lanes, 4)
    lanes = lanes + exchanged(lanes, 2)
    return lanes + exchanged(lanes, 1)


@triton.jit
def random_signs(number, k0, k1, factor, addend, flip, TILES: tl.constexpr):
    """Return random signs of one round.

    Bit r of an element's word negates the element in row r. A row's hash has the bits of its elements. Thread r
    computes the hash of row r, and the warp transposes them.
    """
    lane = tl.arange(0, ROW)[None, :]
    rows = tl.arange(0, TILES)[:, None] * ROWS + lane
    words = hash32(2 * rows + number, k0, k1, factor, addend, flip)
    words = _blocks_swapped(words, 16)
    words = _blocks_swapped(words, 8)
    words = _blocks_swapped(words, 4)
    words = _blocks_swapped(words, 2)
    return _blocks_swapped(words, 1)


@triton.jit
def _blocks_swapped(words, DISTANCE: tl.constexpr):
    """Perform a step of a bit transposition.

    It swaps off-diagonal blocks between threads.
    """
    LOW: tl.constexpr = _low_columns(DISTANCE)
    HIGH: tl.constexpr = LOW ^ 0xFFFFFFFF
    other = exchanged(words, DISTANCE)
    lower = (words & LOW) | ((other & LOW) << DISTANCE)
    upper = (words & HIGH) | ((other & HIGH) >> DISTANCE)
    return tl.where(((tl.arange(0, ROW) & DISTANCE) == 0)[None, :], lower, upper)


@triton.jit
def signed(x, signs):
    """Negate elements whose bit of `random_signs` is set."""
    row = tl.arange(0, ROWS).to(tl.uint32)[None, :, None]
    bits = x.to(tl.uint32, bitcast=True) ^ ((signs[:, None, :] << (31 - row)) & 0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def transformed(x, sizes, left):
    """Return the Walsh-Hadamard transform of buckets.

    They have ``sizes`` coordinates, powers of two from 32 on. Other coordinates are 0; there are ``left`` elements. A
    butterfly within a row rounds once: an element times 1 or -1, plus the other one.
    """
    for stage in tl.static_range(5):
        upper = ((tl.arange(0, ROW) & 2**stage) != 0)[None, None, :]
        sign = tl.broadcast_to(tl.where(upper, -1.0, 1.0), x.shape)
        x = tl.fma(x, sign, exchanged(x, 2**stage))
    if left == x.shape[0] * TILE:
        for stage in tl.static_range(5):
            x = _rows_added(x, sizes, 2**stage, True)
    else:
        for stage in tl.static_range(5):
            x = _rows_added(x, sizes, 2**stage, False)
    return x


@triton.jit
def _rows_added(x, sizes, DISTANCE: tl.constexpr, WHOLE: tl.constexpr):
    """Replace rows at a distance by ``(a + b, a - b)``.

    Only buckets with more coordinates than the distance change.
    """
    TILES: tl.constexpr = x.shape[0]
    pairs = tl.reshape(x, [TILES, ROWS.value // (2 * DISTANCE), 2, DISTANCE, ROW])
    a, b = tl.split(tl.permute(pairs, (0, 1, 3, 4, 2)))
    low, high = a + b, a - b
    if not WHOLE:
        takes_part = (sizes > ROW * DISTANCE)[:, :, None, None]
        low, high = tl.where(takes_part, low, a), tl.where(takes_part, high, b)
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 4, 2, 3)), [TILES, ROWS, ROW])


@triton.jit
def coordinates(left):
    """Return the number of coordinates.

    An incomplete bucket has a power of two, at least 32.
    """
    rest = left % TILE
    size = tl.where(rest > 0, ROW, 0)
    for stage in tl.static_range(5, 10):
        size = tl.where(rest > 2**stage, 2 ** (stage + 1), size)
    return left - rest + size


@triton.jit
def sizes_of(count, TILES: tl.constexpr):
    """Return the number of coordinates of each bucket.

    They are ``count`` in total.
    """
    tile = tl.arange(0, TILES)[:, None]
    return tl.where(tile < count // TILE, TILE, tl.where(tile == count // TILE, count % TILE, 0))
