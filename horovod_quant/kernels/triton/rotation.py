"""EDEN's kernels: signs, Walsh-Hadamard transforms, levels. `horovod_quant.kernels.rotation` says what they mean."""

import triton
import triton.language as tl

from horovod_quant.kernels import rotation
from horovod_quant.kernels.reference import MIN_NORM
from horovod_quant.kernels.triton.columns import (
    FACTOR,
    NORMS,
    POINTERS,
    SCALE,
    SOURCE,
    SQUARES,
    START,
    TARGET,
)
from horovod_quant.kernels.triton.decoding import codes_at
from horovod_quant.kernels.triton.elements import (
    ABS,
    INF_BITS,
    ROW,
    TILE,
    below,
    elements_left,
    float_bits,
    float_pointer,
    hash32,
    place,
    read,
    signs_key,
    write,
)
from horovod_quant.kernels.triton.norms import sum_of_lanes
from horovod_quant.kernels.triton.trellis import (
    LAST_OF_A_SUM,
    ROWS,
    levels_of_codes,
    write_trellis_codes,
)

KEY_ENTRIES = tl.constexpr(6)
"""Numbers of a key in a list of pointers, see `signs_key`."""

_STAGES = tl.constexpr(TILE.value.bit_length() - 1)
_LARGEST_SHIFT = tl.constexpr(rotation.LARGEST_SHIFT)
_SMALLEST = tl.constexpr(float(rotation.SMALLEST))
_ROWS_OF_A_SUM = tl.constexpr(rotation.ROWS_OF_A_SUM)
_MIN_NORM_BITS = tl.constexpr(int(MIN_NORM.view("int32")))


@triton.constexpr_function
def _level(bits, i):
    return rotation.LEVELS[bits][i]


@triton.constexpr_function
def _threshold(bits, i):
    return rotation.THRESHOLDS[bits][i]


# ---- to coordinates ----------------------------------------------------------------------------------------------


@triton.jit
def rotate(table, owners, KIND: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr):
    """Coordinates, and of each bucket its sum of squares and the unit of its thresholds. A program takes ``TILES``.

    The sum is NaN for a bucket that is not finite, which, like one that counts as zeros, has no other coordinates than
    zeros. The list of pointers holds the key.
    """
    row, block = place(table, owners)
    left = elements_left(row, block * (TILES * TILE), TILES * TILE)
    if left == TILES * TILE:
        _rotate(table, row, block, left, KIND, ALIGNED, TILES, WHOLE=True)
    else:
        _rotate(table, row, block, left, KIND, ALIGNED, TILES, WHOLE=False)


@triton.jit
def _rotate(
    table, row, block, left, KIND: tl.constexpr, ALIGNED: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    first = block * (TILES * TILE)
    source = float_pointer(tl.load(row + SOURCE), KIND, ALIGNED) + first
    tile = tl.arange(0, TILES)
    lane = tl.arange(0, ROW)
    offsets = tl.arange(0, TILES * TILE)
    x = tl.reshape(read(source, offsets, below(offsets, left, WHOLE), KIND), [TILES, TILE])

    maxima = tl.max(x.to(tl.int32, bitcast=True) & ABS, axis=1)
    usable = (maxima >= _MIN_NORM_BITS) & (maxima < INF_BITS)
    shift = tl.where(usable, tl.minimum((maxima >> 23) - 127, _LARGEST_SHIFT), 0)
    factor = ((127 - shift) << 23).to(tl.float32, bitcast=True)[:, None]
    lanes = tl.zeros([TILES, ROW], tl.float64)
    for first_row in range(0, ROWS, _ROWS_OF_A_SUM):
        own = tl.zeros([TILES, ROW], tl.float32)
        for number in tl.static_range(_ROWS_OF_A_SUM):
            row_at = tile[:, None] * TILE + (lane + (first_row + number) * ROW)[None, :]
            values = _in_range(read(source, row_at, below(row_at, left, WHOLE), KIND), usable, factor)
            own = own + values * values
        lanes = lanes + own.to(tl.float64)
    squares = sum_of_lanes(lanes, TILES)

    count = _coordinates(left)
    key = table + tl.load(row + POINTERS)
    k0, k1, turn, addend, flip = signs_key(key, 2 * ((tl.load(row + START) + first) // ROW))
    z = tl.reshape(_in_range(x, usable, factor), [TILES * TILE])
    z = _transformed(_signed(z, 0, k0, k1, turn, addend, flip, TILES), count, TILES, WHOLE)
    z = _transformed(_signed(z, 1, k0, k1, turn, addend, flip, TILES), count, TILES, WHOLE)
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.float32)) + first
    tl.store(target + offsets, z, mask=below(offsets, count, WHOLE))

    used = below(tile * TILE, left, WHOLE)
    sizes = tl.where(tile < count // TILE, TILE, count % TILE)
    units = tl.sqrt(squares * sizes.to(tl.float64)).to(tl.float32)
    tl.store(tl.load(row + NORMS).to(tl.pointer_type(tl.float32)) + block * TILES + tile, units, mask=used)
    squares = squares * ((shift + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    squares = tl.where(maxima < INF_BITS, squares, float("nan"))
    tl.store(
        tl.load(row + SQUARES).to(tl.pointer_type(tl.float64)) + block * TILES + tile, squares, mask=used
    )


@triton.jit
def _in_range(x, usable, factor):
    """Elements of buckets, times a power of two for each."""
    x = tl.where(usable[:, None], x, 0.0) * factor
    return tl.where(tl.abs(x) < _SMALLEST, 0.0, x)


# ---- to codes ----------------------------------------------------------------------------------------------------


@triton.jit
def round_coordinates(table, owners, BITS: tl.constexpr, TRELLIS: tl.constexpr, TILES: tl.constexpr):
    """Packed codes, and the buckets' scales, of what `rotate` has made. A program takes ``TILES`` tiles."""
    row, block = place(table, owners)
    left = elements_left(row, block * (TILES * TILE), TILES * TILE)
    if left == TILES * TILE:
        _round_coordinates(row, block, left, BITS, TRELLIS, TILES, WHOLE=True)
    else:
        _round_coordinates(row, block, left, BITS, TRELLIS, TILES, WHOLE=False)


@triton.jit
def _round_coordinates(
    row, block, left, BITS: tl.constexpr, TRELLIS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr
):
    source = tl.load(row + SOURCE).to(tl.pointer_type(tl.float32)) + block * (TILES * TILE)
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.uint32)) + block * (TILES * BITS * ROW)
    word_rows = (left // ROW * BITS + 31) // 32
    tile = tl.arange(0, TILES)
    used = below(tile * TILE, left, WHOLE)
    norms = tl.load(row + NORMS).to(tl.pointer_type(tl.float32)) + block * TILES
    units = tl.load(norms + tile, mask=used, other=0.0)[:, None]
    if TRELLIS:
        lanes = write_trellis_codes(source, target, left, word_rows, units, BITS, TILES, WHOLE)
    else:
        lanes = _write_nearest_codes(source, target, left, word_rows, units, BITS, TILES, WHOLE)
    products = sum_of_lanes(lanes, TILES)
    squares = tl.load(row + SQUARES).to(tl.pointer_type(tl.float64)) + block * TILES
    squares = tl.load(squares + tile, mask=used, other=0.0)
    scales = (squares / tl.where(products != 0.0, products, 1.0)).to(tl.float32)
    tl.store(tl.load(row + SCALE).to(tl.pointer_type(tl.float32)) + block * TILES + tile, scales, mask=used)


@triton.jit
def _write_nearest_codes(
    source, target, left, word_rows, units, BITS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr
):
    """See `write_trellis_codes`."""
    tile = tl.arange(0, TILES)
    lane = tl.arange(0, ROW)
    lanes = tl.zeros([TILES, ROW], tl.float64)
    own = tl.zeros([TILES, ROW], tl.float32)
    words = tl.zeros([TILES, ROW], tl.uint32)
    for number in tl.static_range(32):
        offsets = tile[:, None] * TILE + (lane + number * ROW)[None, :]
        z = tl.load(source + offsets, mask=below(offsets, left, WHOLE), other=0.0)
        index = tl.zeros([TILES, ROW], tl.uint32)
        for i in tl.static_range(2 ** (BITS - 1) - 1):
            index = index + (tl.abs(z) > units * _threshold(BITS, i)).to(tl.uint32)
        own = own + tl.abs(z) * _magnitudes(index, BITS)
        if (LAST_OF_A_SUM & number) == LAST_OF_A_SUM:
            lanes = lanes + own.to(tl.float64)
            own = tl.zeros([TILES, ROW], tl.float32)
        codes = index | ((z < 0.0).to(tl.uint32) << (BITS - 1))
        words = words | (codes << (number * BITS % 32))
        if number * BITS % 32 + BITS >= 32:
            word = tile * BITS + number * BITS // 32
            has_word = below(word, word_rows, WHOLE)
            tl.store(target + (word[:, None] * ROW + lane[None, :]), words, mask=has_word[:, None])
            if number * BITS % 32 + BITS > 32:
                words = codes >> (32 - number * BITS % 32)
            else:
                words = tl.zeros([TILES, ROW], tl.uint32)
    return lanes


# ---- back --------------------------------------------------------------------------------------------------------


@triton.jit
def add_rotated(
    table, owners,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BITS: tl.constexpr, TRELLIS: tl.constexpr, WORKERS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """The sum of the workers' elements. A program takes ``TILES`` tiles.

    The list of pointers holds each worker's words, scales and key.
    """
    row, block = place(table, owners)
    left = elements_left(row, block * (TILES * TILE), TILES * TILE)
    if left == TILES * TILE:
        _add_rotated(table, row, block, left, KIND, ALIGNED, BITS, TRELLIS, WORKERS, TILES, WHOLE=True)
    else:
        _add_rotated(table, row, block, left, KIND, ALIGNED, BITS, TRELLIS, WORKERS, TILES, WHOLE=False)


@triton.jit
def _add_rotated(
    table, row, block, left,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BITS: tl.constexpr, TRELLIS: tl.constexpr, WORKERS: tl.constexpr,
    TILES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    first = block * (TILES * TILE)
    index = 2 * ((tl.load(row + START) + first) // ROW)
    factor = float_bits(tl.load(row + FACTOR))
    pointers = table + tl.load(row + POINTERS)
    total = _workers_values(pointers, index, block, left, factor, BITS, TRELLIS, TILES, WHOLE)
    for worker in range(1, WORKERS):
        own = pointers + (2 + KEY_ENTRIES) * worker
        total = total + _workers_values(own, index, block, left, factor, BITS, TRELLIS, TILES, WHOLE)
    offsets = tl.arange(0, TILES * TILE)
    target = float_pointer(tl.load(row + TARGET), KIND, ALIGNED) + first
    write(target, offsets, total, below(offsets, left, WHOLE), KIND)


@triton.jit
def _workers_values(
    pointers, index, block, left, factor,
    BITS: tl.constexpr, TRELLIS: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One worker's elements, by tile."""
    tile = tl.arange(0, TILES)
    count = _coordinates(left)
    number = tl.arange(0, TILES * 32)
    inside = tl.broadcast_to(below(number * ROW, count, WHOLE)[:, None], [TILES * 32, ROW])
    words = tl.load(pointers).to(tl.pointer_type(tl.uint32))
    rows = (block * (TILES * 32)).to(tl.int32) + number
    codes = codes_at(words, rows, inside, BITS)
    if TRELLIS:
        in_tile = (number % 32)[:, None]
        before = codes_at(words, rows - 1, inside & (in_tile > 0), BITS)
        earlier = codes_at(words, rows - 2, inside & (in_tile > 1), BITS)
        levels = levels_of_codes(codes, before, earlier, in_tile == 0, BITS)
    else:
        levels = _magnitudes(codes & (2 ** (BITS - 1) - 1), BITS).to(tl.uint32, bitcast=True)
        levels = (levels | ((codes >> (BITS - 1)) << 31)).to(tl.float32, bitcast=True)

    k0, k1, shift, addend, flip = signs_key(pointers + 2, index)
    x = _transformed(tl.reshape(levels, [TILES * TILE]), count, TILES, WHOLE)
    x = _transformed(_signed(x, 1, k0, k1, shift, addend, flip, TILES), count, TILES, WHOLE)
    x = tl.reshape(_signed(x, 0, k0, k1, shift, addend, flip, TILES), [TILES, TILE])
    scales = tl.load(pointers + 1).to(tl.pointer_type(tl.float32)) + block * TILES
    units = tl.load(scales + tile, mask=below(tile * TILE, left, WHOLE), other=0.0) * factor
    return tl.reshape(x * units[:, None], [TILES * TILE])


# ---- what they share ---------------------------------------------------------------------------------------------


@triton.jit
def _coordinates(left):
    """How many a program's elements have."""
    rest = left % TILE
    size = tl.where(rest > 0, ROW, 0)
    for stage in tl.static_range(5, _STAGES):
        size = tl.where(rest > 2**stage, 2 ** (stage + 1), size)
    return left - rest + size


@triton.jit
def _transformed(x, count, TILES: tl.constexpr, WHOLE: tl.constexpr):
    """The Walsh-Hadamard transform of each tile, of which the last may have fewer of the ``count`` coordinates."""
    for stage in tl.static_range(_STAGES):
        x = _butterflies(x, count, TILES * TILE, 2**stage, WHOLE)
    return x


@triton.jit
def _butterflies(x, count, COUNT: tl.constexpr, H: tl.constexpr, WHOLE: tl.constexpr):
    """``(a + b, a - b)`` of elements at a distance of ``H``, in tiles with more coordinates than that."""
    a, b = tl.split(tl.permute(tl.reshape(x, [COUNT // (2 * H), 2, H]), (0, 2, 1)))
    low, high = a + b, a - b
    if not WHOLE:
        tile = tl.arange(0, COUNT // (2 * H))[:, None] // (TILE // (2 * H))
        takes_part = (tile < count // TILE) | (count % TILE > H)
        low, high = tl.where(takes_part, low, a), tl.where(takes_part, high, b)
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [COUNT])


@triton.jit
def _signed(x, NUMBER: tl.constexpr, k0, k1, shift, addend, flip, TILES: tl.constexpr):
    """Elements with the random signs of the first or the second round."""
    rows = hash32(2 * tl.arange(0, TILES * 32) + NUMBER, k0, k1, shift, addend, flip)
    signs = (rows[:, None] >> tl.arange(0, ROW).to(tl.uint32)[None, :]) << 31
    return (x.to(tl.uint32, bitcast=True) ^ tl.reshape(signs, [TILES * TILE])).to(tl.float32, bitcast=True)


@triton.jit
def _magnitudes(index, BITS: tl.constexpr):
    """The positive levels of these numbers."""
    values = tl.full(index.shape, _level(BITS, 0), tl.float32)
    for i in tl.static_range(1, 2 ** (BITS - 1)):
        values = tl.where(index >= i, _level(BITS, i), values)
    return values
