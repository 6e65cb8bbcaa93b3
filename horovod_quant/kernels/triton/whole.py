"""Kernels for whole arrays: copies, conversions, sums of workers' arrays."""

import triton
import triton.language as tl

from horovod_quant.kernels.triton.columns import FACTOR, NORMS, NUMBER, POINTERS, SOURCE, TARGET
from horovod_quant.kernels.triton.elements import elements_of_program, float_bits, float_pointer, read, write


@triton.jit
def copy_words(table, owners, COUNT: tl.constexpr):
    """Copy 4-byte words; ``COUNT`` per program."""
    row, first, offsets, inside = elements_of_program(table, owners, COUNT)
    source = tl.load(row + SOURCE).to(tl.pointer_type(tl.int32)) + first
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.int32)) + first
    tl.store(target + offsets, tl.load(source + offsets, mask=inside, other=0), mask=inside)


@triton.jit
def any_bits(table, owners, WORKERS: tl.constexpr, COUNT: tl.constexpr):
    """Write the bitwise or of arrays of 4-byte words."""
    row, first, offsets, inside = elements_of_program(table, owners, COUNT)
    pointers = table + tl.load(row + POINTERS)
    array = tl.load(pointers).to(tl.pointer_type(tl.int32)) + first
    bits = tl.load(array + offsets, mask=inside, other=0)
    for worker in range(1, WORKERS):
        array = tl.load(pointers + worker).to(tl.pointer_type(tl.int32)) + first
        bits = bits | tl.load(array + offsets, mask=inside, other=0)
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.int32)) + first
    tl.store(target + offsets, bits, mask=inside)


@triton.jit
def write_word(table, owners):
    """Write a number to a word."""
    row, _, _, _ = elements_of_program(table, owners, 1)
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.uint32))
    tl.store(target, tl.load(row + NUMBER).to(tl.uint32))


@triton.jit
def convert(
    table, owners,
    KIND: tl.constexpr, TARGET_KIND: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Convert elements to another type, by float32 times a factor.

    ``COUNT`` per program.
    """
    row, first, offsets, inside = elements_of_program(table, owners, COUNT)
    x = read(float_pointer(tl.load(row + SOURCE), KIND) + first, offsets, inside, KIND)
    target = float_pointer(tl.load(row + TARGET), TARGET_KIND) + first
    write(target, offsets, x * float_bits(tl.load(row + FACTOR)), inside, TARGET_KIND)


@triton.jit
def shorten(
    table, owners,
    KIND: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Scale elements in float32 down to a maximum norm.

    The factor is the maximum, for a larger finite norm.
    """
    row, first, offsets, inside = elements_of_program(table, owners, COUNT)
    x = read(float_pointer(tl.load(row + SOURCE), KIND) + first, offsets, inside, KIND)
    norm = tl.load(tl.load(row + NORMS).to(tl.pointer_type(tl.float32)))
    most = float_bits(tl.load(row + FACTOR))
    too_long = (most < norm) & (norm < float("inf"))
    factor = tl.where(too_long, tl.div_rn(most, tl.where(too_long, norm, 1.0)), 1.0)
    target = float_pointer(tl.load(row + TARGET), "float32") + first
    write(target, offsets, x * factor, inside, "float32")


@triton.jit
def mean(table, owners, WORKERS: tl.constexpr, COUNT: tl.constexpr):
    """Write the sum of float32 arrays in order, times a factor.

    The list of pointers has the arrays.
    """
    row, first, offsets, inside = elements_of_program(table, owners, COUNT)
    pointers = table + tl.load(row + POINTERS)
    array = tl.load(pointers).to(tl.pointer_type(tl.float32)) + first
    total = tl.load(array + offsets, mask=inside, other=0.0)
    for worker in range(1, WORKERS):
        array = tl.load(pointers + worker).to(tl.pointer_type(tl.float32)) + first
        total = total + tl.load(array + offsets, mask=inside, other=0.0)
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.float32)) + first
    tl.store(target + offsets, total * float_bits(tl.load(row + FACTOR)), mask=inside)
