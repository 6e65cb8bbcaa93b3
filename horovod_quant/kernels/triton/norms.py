"""Kernels that compute the norms of buckets."""

import triton
import triton.language as tl

from horovod_quant.kernels.triton.columns import SOURCE, TARGET
from horovod_quant.kernels.triton.elements import (
    INF_BITS,
    ROW,
    below,
    float_pointer,
    magnitude,
    program_of,
    read,
    read_magnitudes,
    read_values,
)


@triton.jit
def bucket_maxima(
    table, owners,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr, CHUNK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Compute maxima of buckets.

    ``BUCKETS`` buckets per program, in chunks of ``CHUNK`` elements of each.
    """
    row, block, left = program_of(table, owners, BUCKETS * BUCKET)
    if left == BUCKETS * BUCKET:
        _bucket_maxima(row, block, left, KIND, ALIGNED, BUCKET, CHUNK, BUCKETS, WHOLE=True)
    else:
        _bucket_maxima(row, block, left, KIND, ALIGNED, BUCKET, CHUNK, BUCKETS, WHOLE=False)


@triton.jit
def _bucket_maxima(
    row, block, left,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr, CHUNK: tl.constexpr, BUCKETS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    source = float_pointer(tl.load(row + SOURCE), KIND, ALIGNED) + block * (BUCKETS * BUCKET)
    bucket = tl.arange(0, BUCKETS)
    if BUCKETS * BUCKET > 2**31:  # beyond offsets of 32 bits
        bucket = bucket.to(tl.int64)
    lane = tl.arange(0, CHUNK)
    largest = tl.zeros([BUCKETS, CHUNK], tl.int32)
    for at in range(0, BUCKET, CHUNK):
        within = at + lane
        offsets = bucket[:, None] * BUCKET + within[None, :]
        inside = below(offsets, left, WHOLE) & below(within[None, :], BUCKET, BUCKET % CHUNK == 0)
        largest = tl.maximum(largest, read_magnitudes(source, offsets, inside, KIND))
    maxima = magnitude(tl.max(largest, axis=1), KIND)
    maxima = tl.minimum(maxima, INF_BITS).to(tl.float32, bitcast=True)
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.float32)) + block * BUCKETS
    tl.store(target + bucket, maxima, mask=below(bucket * BUCKET, left, WHOLE))


@triton.jit
def bucket_sums(
    table, owners,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, TERM: tl.constexpr,
):  # fmt: skip
    """Compute sums of a term of each element.

    Terms are the elements (``TERM="itself"``), their magnitudes (``"magnitude"``) or squares (``"square"``).
    ``BUCKETS`` buckets per program, a row of 32 elements of each at a time.
    """
    row, block, left = program_of(table, owners, BUCKETS * BUCKET)
    if left == BUCKETS * BUCKET:
        _bucket_sums(row, block, left, KIND, ALIGNED, BUCKET, BUCKETS, TERM, WHOLE=True)
    else:
        _bucket_sums(row, block, left, KIND, ALIGNED, BUCKET, BUCKETS, TERM, WHOLE=False)


@triton.jit
def _bucket_sums(
    row, block, left,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr,
    TERM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    source = float_pointer(tl.load(row + SOURCE), KIND, ALIGNED) + block * (BUCKETS * BUCKET)
    bucket = tl.arange(0, BUCKETS)
    if BUCKETS * BUCKET > 2**31:  # beyond offsets of 32 bits
        bucket = bucket.to(tl.int64)
    lane = tl.arange(0, ROW)
    lanes = tl.zeros([BUCKETS, ROW], tl.float64)
    for at in range(0, BUCKET, ROW):
        offsets = bucket[:, None] * BUCKET + (at + lane)[None, :]
        inside = below(offsets, left, WHOLE)
        if TERM == "square":
            terms = _squares(read_values(source, offsets, inside, KIND), KIND)
        elif TERM == "magnitude":
            terms = tl.abs(read(source, offsets, inside, KIND).to(tl.float64))
        else:
            terms = read(source, offsets, inside, KIND).to(tl.float64)
        lanes = lanes + terms
    total = sum_of_lanes(lanes, BUCKETS)
    bits = total.to(tl.uint64, bitcast=True)
    rounded = (((bits + 0x10000000) >> 29) << 29).to(tl.float64, bitcast=True)
    sums = tl.where(tl.abs(total) < float("inf"), rounded, float("inf"))
    target = tl.load(row + TARGET).to(tl.pointer_type(tl.float64)) + block * BUCKETS
    tl.store(target + bucket, sums, mask=below(bucket * BUCKET, left, WHOLE))


@triton.jit
def _squares(x, KIND: tl.constexpr):
    """Return exact squares: of float16 elements in float32, of others in float64."""
    if KIND == "float16":
        squares = (x * x).to(tl.float64)
    else:
        squares = x.to(tl.float64) * x.to(tl.float64)
    return squares


@triton.jit
def sum_of_lanes(lanes, BUCKETS: tl.constexpr):
    """Return the sum of each bucket's 32 lanes, by a tree."""
    lanes = _halves_added(lanes, BUCKETS, 16)
    lanes = _halves_added(lanes, BUCKETS, 8)
    lanes = _halves_added(lanes, BUCKETS, 4)
    lanes = _halves_added(lanes, BUCKETS, 2)
    lanes = _halves_added(lanes, BUCKETS, 1)
    return tl.reshape(lanes, [BUCKETS])


@triton.jit
def _halves_added(lanes, BUCKETS: tl.constexpr, HALF: tl.constexpr):
    """Add the second half of each bucket's lanes to the first.

    A Triton reduction has no fixed order.
    """
    pairs = tl.permute(tl.reshape(lanes, [BUCKETS, 2, HALF]), (0, 2, 1))
    low, high = tl.split(pairs)
    return low + high
