"""Device functions that all kernels share.

float32 arithmetic with one rounding per operation; launches forbid fused multiply-adds (see `launching`). Non-finite
numbers are detected by their bits, because a GPU's arithmetic changes the sign of a NaN.
"""

import triton
import triton.language as tl

from horovod_quant.kernels import keys, layout
from horovod_quant.kernels.triton.columns import (
    ADDEND,
    COLUMNS,
    ELEMENTS,
    FIRST_BLOCK,
    FLIP,
    K0,
    K1,
    SHIFT,
    START,
)

ROW = tl.constexpr(layout.ROW)
TILE = tl.constexpr(layout.TILE)
ABS = tl.constexpr(0x7FFFFFFF)
INF_BITS = tl.constexpr(0x7F800000)
ONE_BITS = tl.constexpr(0x3F800000)
MIN_NORM = tl.constexpr(2.0**-96)
_WEYL = tl.constexpr(keys.WEYL)
_MULTIPLIER_1 = tl.constexpr(keys.MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(keys.MULTIPLIER_2)
_INCREMENT = tl.constexpr(keys.INCREMENT)
_MIX_1 = tl.constexpr(keys.MIX_1)
_MIX_2 = tl.constexpr(keys.MIX_2)


# ---- a program's tensor ------------------------------------------------------------------------------------------


@triton.jit
def program_of(table, owners, COUNT: tl.constexpr):
    """Return a program's table row, number within the tensor, and elements.

    They are ``COUNT``, fewer in a tensor's last program; int32.
    """
    program = tl.program_id(0)
    row = table + tl.load(owners + program) * COLUMNS
    block = program - tl.load(row + FIRST_BLOCK)
    return row, block, tl.minimum(tl.load(row + ELEMENTS) - block * COUNT, COUNT).to(tl.int32)


@triton.jit
def elements_of_program(table, owners, COUNT: tl.constexpr):
    """Return a program's table row, first element, offsets and mask."""
    row, block, left = program_of(table, owners, COUNT)
    offsets = tl.arange(0, COUNT)
    return row, block * COUNT, offsets, offsets < left


@triton.jit
def below(numbers, left, WHOLE: tl.constexpr):
    """Return the mask ``numbers < left``, all true for a ``WHOLE`` program.

    Kernels have one branch for whole programs, and one for a tensor's last program: memory moves in vectors only
    without a computed mask.
    """
    if WHOLE:
        inside = tl.full(numbers.shape, True, tl.int1)
    else:
        inside = numbers < left
    return inside


# ---- memory ------------------------------------------------------------------------------------------------------


@triton.jit
def float_pointer(address, KIND: tl.constexpr, ALIGNED: tl.constexpr = False):
    """Return a pointer to a tensor of a floating-point type.

    The short types are read as their bits.
    """
    if KIND == "float32":
        pointer = address.to(tl.pointer_type(tl.float32))
    elif KIND == "float64":
        pointer = address.to(tl.pointer_type(tl.float64))
    else:
        pointer = address.to(tl.pointer_type(tl.uint16))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def float_bits(value):
    """Return the float32 number whose bits are in a table."""
    return value.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def read(source, offsets, inside, KIND: tl.constexpr):
    """Read elements as float32, rounded to nearest even, 0 where not ``inside``.

    NaNs keep their signs.
    """
    if KIND == "float32":
        x = tl.load(source + offsets, mask=inside, other=0.0)
    elif KIND == "bfloat16":
        raw = tl.load(source + offsets, mask=inside, other=0).to(tl.uint32)
        x = (raw << 16).to(tl.float32, bitcast=True)
    elif KIND == "float16":
        short = tl.load(source + offsets, mask=inside, other=0)
        wide = short.to(tl.float16, bitcast=True).to(tl.float32).to(tl.uint32, bitcast=True)
        sign = (short.to(tl.uint32) & 0x8000) << 16
        x = ((wide & ABS) | sign).to(tl.float32, bitcast=True)
    else:
        double = tl.load(source + offsets, mask=inside, other=0.0)
        short = double.to(tl.float32).to(tl.uint32, bitcast=True)
        sign = (double.to(tl.uint64, bitcast=True) >> 63).to(tl.uint32) << 31
        x = ((short & ABS) | sign).to(tl.float32, bitcast=True)
    return x


@triton.jit
def read_values(source, offsets, inside, KIND: tl.constexpr):
    """Read elements as `read`, but NaNs may lose their signs."""
    if KIND == "float16":
        x = tl.load(source + offsets, mask=inside, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "float64":
        x = tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)
    else:
        x = read(source, offsets, inside, KIND)
    return x


@triton.jit
def read_magnitudes(source, offsets, inside, KIND: tl.constexpr):
    """Read integers in the order of the elements' magnitudes.

    `magnitude` converts them to float32 bits.
    """
    if KIND == "float16" or KIND == "bfloat16":
        x = tl.load(source + offsets, mask=inside, other=0).to(tl.int32) & 0x7FFF
    else:
        x = read(source, offsets, inside, KIND).to(tl.int32, bitcast=True) & ABS
    return x


@triton.jit
def magnitude(x, KIND: tl.constexpr):
    if KIND == "float16":
        x = x.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) & ABS
    elif KIND == "bfloat16":
        x = x << 16
    return x


@triton.jit
def write(target, offsets, values, inside, KIND: tl.constexpr):
    """Write float32 values, rounded to nearest even, where ``inside``."""
    if KIND == "float32":
        tl.store(target + offsets, values, mask=inside)
    elif KIND == "bfloat16":
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & ABS) > INF_BITS, 0x7FC0, rounded)
        tl.store(target + offsets, rounded.to(tl.uint16), mask=inside)
    elif KIND == "float16":
        tl.store(target + offsets, values.to(tl.float16).to(tl.uint16, bitcast=True), mask=inside)
    else:
        tl.store(target + offsets, values.to(tl.float64), mask=inside)


# ---- random bits -------------------------------------------------------------------------------------------------


@triton.jit
def hash_key(row, first):
    """Return `hash32`'s arguments for elements from ``first`` on, five uint32."""
    index = (tl.load(row + START) + first).to(tl.uint32)
    return (
        index * _WEYL + tl.load(row + K0).to(tl.uint32),
        tl.load(row + K1).to(tl.uint32) * _MULTIPLIER_2,
        _power_of_two(tl.load(row + SHIFT)),
        tl.load(row + ADDEND).to(tl.uint32),
        tl.load(row + FLIP).to(tl.uint32),
    )


@triton.jit
def hash32(offsets, k0, k1, factor, addend, flip):
    """Return `horovod_quant.kernels.keys.hash32` at ``offsets`` from the first element of `hash_key`."""
    return hash_of(hash_input(offsets, k0), k1, factor, addend, flip)


@triton.jit
def hash_input(offsets, k0):
    """Return the Weyl sequence at ``offsets``.

    `hash_step` advances from an element to a later one.
    """
    return offsets.to(tl.uint32) * _WEYL + k0


@triton.constexpr_function
def hash_step(elements):
    return elements * keys.WEYL & 0xFFFFFFFF


@triton.jit
def hash_of(h, k1, factor, addend, flip):
    """Finish the hash after the Weyl sequence.

    ``k1`` is premultiplied and the shift a factor, so that additions cost nothing.
    """
    h = h ^ (h >> 16)
    h = h * _MULTIPLIER_1
    h = h ^ (h >> 15)
    h = h * _MULTIPLIER_2 + k1
    h = h ^ (h >> 16)
    return (h * factor + addend) ^ flip


@triton.jit
def _power_of_two(shift):
    return tl.full((), 1, tl.uint32) << shift.to(tl.uint32)


@triton.jit
def signs_key(pointers, index):
    """Return `hash32`'s arguments for a key in a list of pointers.

    The key's entries begin at ``index``. The entries are the key's two words as one number, a pointer, a worker, shift,
    addend and flip. A pointer that is not 0 points to a word with a number, which is still to be mixed into the key's
    words, like the worker; see `horovod_quant.kernels.keys.RngKey.key`.
    """
    state = tl.load(pointers).to(tl.uint64)
    word = tl.load(pointers + 1)
    if word != 0:
        state = _absorb(state, tl.load(word.to(tl.pointer_type(tl.uint32))).to(tl.uint64))
        state = _absorb(state, tl.load(pointers + 2).to(tl.uint64))
    return (
        index.to(tl.uint32) * _WEYL + state.to(tl.uint32),
        (state >> 32).to(tl.uint32) * _MULTIPLIER_2,
        _power_of_two(tl.load(pointers + 3)),
        tl.load(pointers + 4).to(tl.uint32),
        tl.load(pointers + 5).to(tl.uint32),
    )


@triton.jit
def _absorb(state, value):
    state = (state ^ value) + _INCREMENT
    state = (state ^ (state >> 30)) * _MIX_1
    state = (state ^ (state >> 27)) * _MIX_2
    return state ^ (state >> 31)


# ---- norms -------------------------------------------------------------------------------------------------------


@triton.jit
def inverse_norms(norms, NUMERATOR: tl.constexpr):
    """Return ``NUMERATOR / norm``.

    It is 0 for a norm that counts as zero or is not finite.
    """
    usable = (norms >= MIN_NORM) & (norms < float("inf"))
    quotients = tl.div_rn(tl.full(norms.shape, NUMERATOR, tl.float32), tl.where(usable, norms, 1.0))
    return tl.where(usable, quotients, 0.0)


@triton.jit
def decoding_scales(norms, factor, LEVELS: tl.constexpr):
    """Return the value of one level times ``factor``.

    NaN where the norm is not finite.
    """
    scales = tl.div_rn(norms, tl.full(norms.shape, LEVELS, tl.float32)) * factor
    return tl.where(norms < float("inf"), scales, float("nan"))
