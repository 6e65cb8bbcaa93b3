"""Columns of a launch's table: the int64 arguments of each tensor.

A launch processes many tensors. Its table has a row for each of them, and lists of further pointers and numbers after
the rows.
"""

import triton.language as tl

NAMES = (
    "first_block",  # the launch's first program for this tensor
    "elements",
    "source",  # pointers to the input, ...
    "target",  # ... to the output, ...
    "norms",
    "momentum",
    "scale",
    "broken",
    "squares",
    "k0",  # the words of a key
    "k1",
    "shift",
    "addend",
    "flip",
    "mirror",
    "start",  # index of the first element in its tensor: it selects the random bits
    "factor",  # bits of a float32
    "second_factor",
    "number",  # the value of a word to write
    "pointers",  # offset of this tensor's list of pointers in the table
)

(
    FIRST_BLOCK,
    ELEMENTS,
    SOURCE,
    TARGET,
    NORMS,
    MOMENTUM,
    SCALE,
    BROKEN,
    SQUARES,
    K0,
    K1,
    SHIFT,
    ADDEND,
    FLIP,
    MIRROR,
    START,
    FACTOR,
    SECOND_FACTOR,
    NUMBER,
    POINTERS,
) = (tl.constexpr(number) for number in range(len(NAMES)))

COLUMNS = tl.constexpr(len(NAMES))
