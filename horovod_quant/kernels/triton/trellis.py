"""Device functions for trellis-coded quantization, which `horovod_quant.kernels.trellis` defines.

A bucket has at most 32 rows, so one word per lane has a bit of each: the decisions of a state, or the branches.
"""

import triton
import triton.language as tl

from horovod_quant.kernels import rotation, trellis
from horovod_quant.kernels.triton.elements import ROW, TILE, below

_FAR = tl.constexpr(float(trellis.FAR))
ROWS = tl.constexpr(TILE.value // ROW.value)
LAST_OF_A_SUM = tl.constexpr(rotation.ROWS_OF_A_SUM - 1)  # a power of two less 1

# By the number of subsets (two in the first row), and by bits.
_LEVELS = {
    subsets: {bits: trellis.ascending(positive[bits]) for bits in positive}
    for subsets, positive in ((2, rotation.LEVELS), (4, trellis.LEVELS))
}
_MIDDLES = {
    subsets: {bits: trellis.middles(levels[bits], subsets) for bits in levels}
    for subsets, levels in _LEVELS.items()
}


@triton.constexpr_function
def _level(bits, subsets, i):
    return _LEVELS[subsets][bits][i]


@triton.constexpr_function
def _middle(bits, subsets, i):
    return _MIDDLES[subsets][bits][i]


# ---- to codes ----------------------------------------------------------------------------------------------------


@triton.jit
def write_trellis_codes(
    source, target, left, word_rows, units, BITS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr
):
    """Write packed codes of tiles' coordinates.

    Return the sums of coordinates times levels, by lane.
    """
    paths = _best_paths(source, left, units, BITS, TILES, WHOLE)
    tile = tl.arange(0, TILES)[:, None]
    lane = tl.arange(0, ROW)[None, :]
    offsets = tile * TILE + lane
    z = tl.load(source + offsets, mask=below(offsets, left, WHOLE), other=0.0)
    branch = paths & 1
    words, levels = _codes_and_levels(z, units, branch, branch, 2, BITS)
    terms = z * levels
    lanes = tl.zeros([TILES, ROW], tl.float64)
    for row in range(1, ROWS):
        is_there = below(offsets + row * ROW, left, WHOLE)
        z = tl.load(source + row * ROW + offsets, mask=is_there, other=0.0)
        subset = (((paths << 1) >> row) & 1) | ((((paths ^ (paths << 2)) >> row) & 1) << 1)
        codes, levels = _codes_and_levels(z, units, (paths >> row) & 1, subset, 4, BITS)
        codes = tl.where(is_there, codes, 0)
        terms = terms + z * levels
        if (LAST_OF_A_SUM & row) == LAST_OF_A_SUM:
            lanes = lanes + terms.to(tl.float64)
            terms = tl.zeros([TILES, ROW], tl.float32)
        shift = row * BITS & 31
        words = words | (codes << shift)
        if shift + BITS >= 32:
            word = tile * BITS + (row * BITS >> 5)
            tl.store(target + (word * ROW + lane), words, mask=below(word, word_rows, WHOLE))
            words = codes >> (32 - shift)
    return lanes


@triton.jit
def _best_paths(source, left, units, BITS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr):
    """Return the branches of the codes in each lane, uint32.

    Bit r is the branch in row r.
    """
    tile = tl.arange(0, TILES)[:, None] * TILE
    offsets = tile + tl.arange(0, ROW)[None, :]
    z = tl.load(source + offsets, mask=below(offsets, left, WHOLE), other=0.0)
    sum_0 = _distance(z, units, 0, 2, BITS)
    sum_1 = _distance(z, units, 1, 2, BITS)
    sum_2 = tl.full([TILES, ROW], _FAR, tl.float32)
    sum_3 = tl.full([TILES, ROW], _FAR, tl.float32)
    decisions_0 = tl.zeros([TILES, ROW], tl.uint32)
    decisions_1 = tl.zeros([TILES, ROW], tl.uint32)
    decisions_2 = tl.zeros([TILES, ROW], tl.uint32)
    decisions_3 = tl.zeros([TILES, ROW], tl.uint32)
    for row in range(1, ROWS):
        is_there = below(tile + row * ROW, left, WHOLE)
        z = tl.load(source + row * ROW + offsets, mask=is_there, other=0.0)
        distance_0 = _distance(z, units, 0, 4, BITS)
        distance_1 = _distance(z, units, 1, 4, BITS)
        distance_2 = _distance(z, units, 2, 4, BITS)
        distance_3 = _distance(z, units, 3, 4, BITS)
        low_0, high_0 = sum_0 + distance_0, sum_2 + distance_2
        low_1, high_1 = sum_0 + distance_2, sum_2 + distance_0
        low_2, high_2 = sum_1 + distance_1, sum_3 + distance_3
        low_3, high_3 = sum_1 + distance_3, sum_3 + distance_1
        sum_0, decisions_0 = _extended(sum_0, decisions_0, low_0, high_0, is_there, row)
        sum_1, decisions_1 = _extended(sum_1, decisions_1, low_1, high_1, is_there, row)
        sum_2, decisions_2 = _extended(sum_2, decisions_2, low_2, high_2, is_there, row)
        sum_3, decisions_3 = _extended(sum_3, decisions_3, low_3, high_3, is_there, row)

    is_upper = tl.where(sum_3 < sum_2, sum_3, sum_2) < tl.where(sum_1 < sum_0, sum_1, sum_0)
    branch = tl.where(is_upper, sum_3 < sum_2, sum_1 < sum_0).to(tl.uint32)
    before = is_upper.to(tl.uint32)
    paths = tl.zeros([TILES, ROW], tl.uint32)
    for row in range(ROWS - 1, 0, -1):
        is_there = below(tile + row * ROW, left, WHOLE)
        if_zero = tl.where(branch != 0, decisions_1, decisions_0)
        if_one = tl.where(branch != 0, decisions_3, decisions_2)
        earlier = (tl.where(before != 0, if_one, if_zero) >> row) & 1
        paths = tl.where(is_there, paths | (branch << row), paths)
        branch = tl.where(is_there, before, branch)
        before = tl.where(is_there, earlier, before)
    return paths | branch


@triton.jit
def _extended(least, decisions, low, high, is_there, row):
    """Extend a state's least sum and decisions by a row.

    The arguments have the sums with b'' = 0 and b'' = 1.
    """
    is_high = is_there & (high < low)
    least = tl.where(is_there, tl.where(is_high, high, low), least)
    return least, decisions | (is_high.to(tl.uint32) << row)


@triton.jit
def _distance(z, units, SUBSET: tl.constexpr, SUBSETS: tl.constexpr, BITS: tl.constexpr):
    """Return the distance of the subset's nearest level."""
    nearest = units * _level(BITS, SUBSETS, SUBSET)
    for i in tl.static_range(SUBSET, SUBSET + SUBSETS * (2 ** (BITS - 1) - 1), SUBSETS):
        is_above = z > units * _middle(BITS, SUBSETS, i)
        nearest = tl.where(is_above, units * _level(BITS, SUBSETS, i + SUBSETS), nearest)
    difference = z - nearest
    return difference * difference


@triton.jit
def _codes_and_levels(z, units, branch, subset, SUBSETS: tl.constexpr, BITS: tl.constexpr):
    index = _nearest_index(z, units, subset, SUBSETS, BITS)
    return index * 2 + branch, _levels_at(index * SUBSETS + subset, SUBSETS, BITS)


@triton.jit
def _nearest_index(z, units, subset, SUBSETS: tl.constexpr, BITS: tl.constexpr):
    """Return the index of the nearest level in each lane's subset."""
    index = tl.zeros(z.shape, tl.uint32)
    for i in tl.static_range(2 ** (BITS - 1) - 1):
        middles = tl.full(z.shape, _middle(BITS, SUBSETS, i * SUBSETS), tl.float32)
        for other in tl.static_range(1, SUBSETS):
            middles = tl.where(subset >= other, _middle(BITS, SUBSETS, i * SUBSETS + other), middles)
        index = index + (z > units * middles).to(tl.uint32)
    return index


# ---- back --------------------------------------------------------------------------------------------------------


@triton.jit
def ascending_levels(SUBSETS: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr):
    """Return the levels of all subsets, at most 32, by lane."""
    lane = tl.arange(0, ROW)[None, :]
    levels = tl.zeros([TILES, ROW], tl.float32)
    for i in tl.static_range(SUBSETS * 2**BITS // 2):
        levels = tl.where(lane == i, _level(BITS, SUBSETS, i), levels)
    return levels


@triton.jit
def _levels_at(index, SUBSETS: tl.constexpr, BITS: tl.constexpr):
    """Return levels by ascending index.

    The lower half has the negated magnitudes of the upper half, reversed.
    """
    HALF: tl.constexpr = SUBSETS * 2**BITS // 4
    number = tl.where(index < HALF, HALF - 1 - index, index - HALF)
    values = tl.full(index.shape, _level(BITS, SUBSETS, HALF), tl.float32)
    for i in tl.static_range(1, HALF):
        values = tl.where(number >= i, _level(BITS, SUBSETS, HALF + i), values)
    return tl.where(index < HALF, -values, values)
