"""EDEN's encoding kernels: signs, Walsh-Hadamard transforms, levels.

`horovod_quant.kernels.rotation` defines them. A bucket stays in the registers of a warp (`hadamard`), from its elements
to its codes and its scale.
"""

import triton
import triton.language as tl

from horovod_quant.kernels import rotation
from horovod_quant.kernels.reference import MIN_NORM
from horovod_quant.kernels.triton.columns import NORMS, POINTERS, SCALE, SOURCE, SQUARES, START, TARGET
from horovod_quant.kernels.triton.elements import (
    ABS,
    INF_BITS,
    ROW,
    TILE,
    below,
    float_pointer,
    program_of,
    signs_key,
)
from horovod_quant.kernels.triton.hadamard import (
    coordinates,
    lane_sums,
    looked_up,
    random_signs,
    signed,
    sizes_of,
    transformed,
)
from horovod_quant.kernels.triton.norms import sum_of_lanes
from horovod_quant.kernels.triton.tiles import read_tiles, write_codes, write_tiles
from horovod_quant.kernels.triton.trellis import write_trellis_codes

_LARGEST_SHIFT = tl.constexpr(rotation.LARGEST_SHIFT)
_SMALLEST = tl.constexpr(float(rotation.SMALLEST))
_MIN_NORM_BITS = tl.constexpr(int(MIN_NORM.view("int32")))


@triton.constexpr_function
def level(bits, i):
    return rotation.LEVELS[bits][i]


@triton.constexpr_function
def _threshold(bits, i):
    return rotation.THRESHOLDS[bits][i]


# ---- to codes, in one pass ---------------------------------------------------------------------------------------


@triton.jit
def encode_rotated(table, owners, KIND: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr):
    """Encode packed codes and the buckets' scales; ``TILES`` buckets per program.

    The list of pointers has the key.
    """
    row, block, left = program_of(table, owners, TILES * TILE)
    z, units, squares = _rotated(table, row, block, left, KIND, TILES)
    lane = tl.arange(0, ROW)[None, :]
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.uint32)) + block * (TILES * BITS * ROW)
    word_rows = (coordinates(left) // ROW * BITS + 31) // 32
    levels = tl.zeros([TILES, ROW], tl.float32)
    for i in tl.static_range(2 ** (BITS - 1)):
        levels = tl.where(lane == i, level(BITS, i), levels)
    index = _nearest(tl.abs(z), units[:, None, :], BITS)
    products = lane_sums(tl.abs(z) * _level_of(index, levels, BITS))
    codes = index | tl.where(z < 0.0, 2 ** (BITS - 1), 0).to(tl.uint32)
    write_codes(target, codes, word_rows, BITS, TILES)
    scales = (squares / tl.where(products != 0.0, products, 1.0)).to(tl.float32)
    scale = tl.load(row + SCALE).to(tl.pointer_type(tl.float32)) + block * TILES
    _store_of_buckets(scale, scales, left, TILES)


@triton.jit
def _store_of_buckets(target, values, left, TILES: tl.constexpr):
    """Write a value that all lanes of a bucket have.

    The pointers include the lanes, since Triton otherwise chooses another layout, with seconds of compile time.
    """
    tile = tl.arange(0, TILES)[:, None]
    lane = tl.arange(0, ROW)[None, :]
    tl.store(target + (tile + lane), values, mask=(tile * TILE < left) & (lane == 0))


@triton.jit
def _nearest(magnitude, units, BITS: tl.constexpr):
    """Return the number of thresholds that magnitudes exceed.

    Thresholds are multiplied by the units; bits are found from the highest.
    """
    if BITS == 1:
        index = tl.zeros(magnitude.shape, tl.uint32)
    elif BITS == 2:
        index = (magnitude > units * _threshold(2, 0)).to(tl.uint32)
    elif BITS == 3:
        high = magnitude > units * _threshold(3, 1)
        middle = tl.where(high, units * _threshold(3, 2), units * _threshold(3, 0))
        index = tl.where(high, 2, 0).to(tl.uint32) + (magnitude > middle).to(tl.uint32)
    else:
        high = magnitude > units * _threshold(4, 3)
        middle = tl.where(high, units * _threshold(4, 5), units * _threshold(4, 1))
        second = magnitude > middle
        upper = tl.where(second, units * _threshold(4, 6), units * _threshold(4, 4))
        lower = tl.where(second, units * _threshold(4, 2), units * _threshold(4, 0))
        last = magnitude > tl.where(high, upper, lower)
        index = tl.where(high, 4, 0).to(tl.uint32) + tl.where(second, 2, 0).to(tl.uint32) + last.to(tl.uint32)
    return index


@triton.jit
def _level_of(index, levels, BITS: tl.constexpr):
    """Return the positive levels with these indices; ``levels`` has them by lane."""
    if BITS == 1:
        values = tl.full(index.shape, level(1, 0), tl.float32)
    elif BITS == 2:
        values = tl.where(index > 0, level(2, 1), level(2, 0))
    else:
        values = looked_up(levels, index)
    return values


@triton.jit
def _rotated(table, row, block, left, KIND: tl.constexpr, TILES: tl.constexpr):
    """Return buckets' coordinates, and each bucket's unit and sum of squares.

    The unit of thresholds and the sum are in all lanes. The sum is NaN for a bucket that is not finite; its coordinates
    are zeros, as those of a bucket that counts as zeros.
    """
    first = block * (TILES * TILE)
    source = float_pointer(tl.load(row + SOURCE), KIND) + first
    x = read_tiles(source, left, KIND, TILES, VALUES=True)
    maxima = tl.max(tl.max(x.to(tl.int32, bitcast=True) & ABS, axis=1), axis=1)[:, None]
    usable = (maxima >= _MIN_NORM_BITS) & (maxima < INF_BITS)
    shift = tl.where(usable, tl.minimum((maxima >> 23) - 127, _LARGEST_SHIFT), 0)
    factor = ((127 - shift) << 23).to(tl.float32, bitcast=True)
    smallest = tl.where(usable, _SMALLEST, float("nan"))  # no number is at least NaN
    x = x * factor[:, None, :]
    x = tl.where(tl.abs(x) >= smallest[:, None, :], x, 0.0)
    squares = lane_sums(x * x)

    sizes = sizes_of(coordinates(left), TILES)
    units = tl.sqrt(squares * sizes.to(tl.float64)).to(tl.float32)
    squares = squares * ((shift + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    squares = tl.where(maxima < INF_BITS, squares, float("nan"))

    key = table + tl.load(row + POINTERS)
    k0, k1, turn, addend, flip = signs_key(key, 2 * ((tl.load(row + START) + first) // ROW))
    for number in range(2):
        signs = random_signs(number, k0, k1, turn, addend, flip, TILES)
        x = transformed(signed(x, signs), sizes, left)
    return x, units, squares


# ---- to codes with a trellis, in two passes -----------------------------------------------------------------------


@triton.jit
def rotate(table, owners, KIND: tl.constexpr, TILES: tl.constexpr):
    """Compute coordinates, and each bucket's sum of squares and unit of thresholds.

    ``TILES`` per program. The list of pointers has the key.
    """
    row, block, left = program_of(table, owners, TILES * TILE)
    x, units, squares = _rotated(table, row, block, left, KIND, TILES)
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.float32)) + block * (TILES * TILE)
    write_tiles(target, x, coordinates(left), "float32", TILES)
    norms = tl.load(row + NORMS).to(tl.pointer_type(tl.float32)) + block * TILES
    _store_of_buckets(norms, units, left, TILES)
    sums = tl.load(row + SQUARES).to(tl.pointer_type(tl.float64)) + block * TILES
    _store_of_buckets(sums, squares, left, TILES)


@triton.jit
def round_to_trellis(table, owners, BITS: tl.constexpr, TILES: tl.constexpr):
    """Encode the coordinates of `rotate` as packed codes and scales.

    ``TILES`` tiles per program.
    """
    row, block, left = program_of(table, owners, TILES * TILE)
    if left == TILES * TILE:
        _round_to_trellis(row, block, left, BITS, TILES, WHOLE=True)
    else:
        _round_to_trellis(row, block, left, BITS, TILES, WHOLE=False)


@triton.jit
def _round_to_trellis(row, block, left, BITS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr):
    source = tl.load(row + SOURCE).to(tl.pointer_type(tl.float32)) + block * (TILES * TILE)
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.uint32)) + block * (TILES * BITS * ROW)
    word_rows = (left // ROW * BITS + 31) // 32
    tile = tl.arange(0, TILES)
    used = below(tile * TILE, left, WHOLE)
    norms = tl.load(row + NORMS).to(tl.pointer_type(tl.float32)) + block * TILES
    units = tl.load(norms + tile, mask=used, other=0.0)[:, None]
    products = sum_of_lanes(
        write_trellis_codes(source, target, left, word_rows, units, BITS, TILES, WHOLE), TILES
    )
    squares = tl.load(row + SQUARES).to(tl.pointer_type(tl.float64)) + block * TILES
    squares = tl.load(squares + tile, mask=used, other=0.0)
    scales = (squares / tl.where(products != 0.0, products, 1.0)).to(tl.float32)
    tl.store(tl.load(row + SCALE).to(tl.pointer_type(tl.float32)) + block * TILES + tile, scales, mask=used)
