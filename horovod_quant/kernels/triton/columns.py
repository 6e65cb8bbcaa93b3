"""Columns of a launch's table: the int64 arguments of each tensor.

A launch processes many tensors. Its table has a row for each of them, and lists of further pointers and numbers after
the rows.
"""

import itertools

import triton.language as tl

_numbers = itertools.count()

FIRST_BLOCK = tl.constexpr(next(_numbers))  # the launch's first program for this tensor
ELEMENTS = tl.constexpr(next(_numbers))
SOURCE = tl.constexpr(next(_numbers))  # pointers to the input, ...
TARGET = tl.constexpr(next(_numbers))  # ... to the output, ...
NORMS = tl.constexpr(next(_numbers))
MOMENTUM = tl.constexpr(next(_numbers))
SCALE = tl.constexpr(next(_numbers))
BROKEN = tl.constexpr(next(_numbers))
SQUARES = tl.constexpr(next(_numbers))
K0 = tl.constexpr(next(_numbers))  # the words of a key
K1 = tl.constexpr(next(_numbers))
SHIFT = tl.constexpr(next(_numbers))
ADDEND = tl.constexpr(next(_numbers))
FLIP = tl.constexpr(next(_numbers))
MIRROR = tl.constexpr(next(_numbers))
START = tl.constexpr(next(_numbers))  # index of the first element in its tensor: it selects the random bits
FACTOR = tl.constexpr(next(_numbers))  # bits of a float32
SECOND_FACTOR = tl.constexpr(next(_numbers))
NUMBER = tl.constexpr(next(_numbers))  # the value of a word to write
POINTERS = tl.constexpr(next(_numbers))  # offset of this tensor's list of pointers in the table

INDEX = {
    name.lower(): column.value for name, column in list(globals().items()) if isinstance(column, tl.constexpr)
}
COLUMNS = tl.constexpr(len(INDEX))
