"""The columns of a launch's table: what a kernel gets of each of its tensors, as int64 numbers.

A launch works on many tensors. Its table has a row for each of them, and behind the rows lists of further pointers and
numbers.
"""

import triton.language as tl

NAMES = (
    "first_block",  # the launch's first program that works on this tensor
    "elements",
    "source",  # pointers: what is read, ...
    "target",  # ... what is written, ...
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
    "number",  # to be written to a word
    "pointers",  # where in the table this tensor's list of pointers begins
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
