"""Cases of norms, statistics, arithmetic, and of uniform and exponential levels."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
from conformance.suite import BFLOAT16, DTYPES, KEY, NOT_FINITE, SPECIAL, Draw, Out, Script, as_type, topic
from helpers import on_the_edge

from horovod_quant.kernels import reference
from horovod_quant.kernels.layout import ROW, TILE, buckets, code_words

BUCKETED = ("bucket_sums", "bucket_magnitude_sums", "bucket_square_sums")
STATISTICS = ("tensor_maximum", "tensor_mean_magnitude", "tensor_deviation")
MAX_LEVELS = 2**15 - 1


def every_short_float(dtype: type) -> np.ndarray:
    return np.arange(65536, dtype=np.uint32).astype(np.uint16).view(dtype)


# ---- norms and statistics


@topic(17, quick=(0, 3, 8))
def norms(draw: Draw) -> Script:
    x, given, bucket_size, _ = draw.gradient()
    count = buckets(len(x), bucket_size)
    yield "bucket_maxima", x, bucket_size
    yield "bucket_maxima", x, bucket_size, Out(count, np.float32)
    for kernel in BUCKETED:
        sums = yield kernel, x, bucket_size
        yield kernel, x, bucket_size, Out(count, np.float64)
    yield "norms_of_square_sums", sums
    for numerator in (1.0, float(127 << 24)):
        yield "inverse_norms", given, numerator
    yield "decoding_scales", given, 2 ** (1 + draw.number) - 1, draw.factor()


@topic(12, quick=(0, 5, 7))
def statistics(draw: Draw) -> Script:
    """Also of ordinary gradients, where a contracted product and a sum, or a rounded inverse, show in the deviation."""
    x, _, _, _ = draw.gradient()
    finite = np.where(np.isfinite(reference.as_float32(x)), x, np.zeros(1, x.dtype)).astype(x.dtype)
    scale = 10.0 ** draw.cycle(-40, -22, -3, 0, 1, 35)
    ordinary = ((draw.rng.standard_normal(3000 + draw.number) + draw.number % 3) * scale).astype(np.float32)
    zeros = np.full(5, -0.0, np.float32)
    for values in (x, finite, ordinary, zeros[:0], zeros, np.array([1e300, 1])):
        for kernel in STATISTICS:
            yield kernel, values


@topic(2, quick=(0, 1))
def short_floats(draw: Draw) -> Script:
    every = every_short_float(draw.cycle(np.float16, BFLOAT16))
    yield "to_float32", every, Out(len(every), np.float32)
    yield "to_float16", every, Out(len(every), np.float16)
    yield "bucket_maxima", every, 32
    yield "bucket_square_sums", every[draw.number :: 7], 32
    yield "next_powers_of_two", every
    finite = every[np.isfinite(reference.as_float32(every))]
    for kernel in STATISTICS:
        yield kernel, finite


@topic(1)
def order_of_sums(draw: Draw) -> Script:
    """Row by row into lanes, and the lanes in a tree: what is tiny is lost in one order and counts in another."""
    for tile_count, step in ((8, 1), (32, -1)):  # TensorFlow's chain of additions, and its loop
        rows = np.zeros((tile_count * TILE // ROW, ROW), np.float32)
        rows[0, 0], rows[1, 0], rows[2:, 0] = 1, 2.0**-12 * (1 - 2.0**-24), 2.0**-27
        yield "bucket_square_sums", rows[::step].reshape(-1), tile_count * TILE
    for kernel in BUCKETED:
        lanes = draw.rng.standard_normal((16, 32)) * 2.0 ** np.arange(-16, 16)
        yield kernel, lanes.reshape(-1).astype(np.float32), 32


# The other backends return float32 also of what they leave as it is.
@topic(15, (), ("native",), "clipping_of_other_types", dtypes=(np.float16, np.float64, BFLOAT16))
@topic(5, quick=(1, 3), dtypes=(np.float32,))
def clipping(draw: Draw, dtypes: tuple[type, ...]) -> Script:
    count = draw.cycle(0, 33, 1024, 1025, 5000)
    x = draw.normal(count)
    broken = x.copy()
    broken[: count // 2 : 7] = np.nan
    for values in (x, broken):
        for most in (1e-30, 0.01, 1.0, 1e6):
            yield "clip", as_type(values, draw.cycle(*dtypes)), most


@topic(4, quick=(0, 1, 2, 3))
def arithmetic(draw: Draw) -> Script:
    values = np.concatenate([SPECIAL, -SPECIAL, NOT_FINITE, -NOT_FINITE])
    a, b = (as_type(pair.reshape(-1), draw.cycle(*DTYPES)) for pair in np.meshgrid(values, values))
    yield "next_powers_of_two", a
    for other in (b, b[7:8], b[-1:], 1e-45, -0.0, math.nan, 1e300):
        flags = yield "less", a, other
        yield "minimum", a, other
        yield "where", flags, a, other
        yield "where", flags, other, 3.0


@topic(4, quick=(0, 1, 2, 3))
def conversions(draw: Draw) -> Script:
    dtype = draw.cycle(*DTYPES)
    x = draw.gradient(4097, dtype).x
    overflow = as_type(np.float32([65504, 65519, 65520, -65520, 1e300, math.inf, math.nan]), dtype)
    for values in (x, overflow, x[:0]):
        yield "to_float32", values, Out(len(values), np.float32)
        yield "to_float16", values, Out(len(values), np.float16)
    pieces = [draw.normal(count) for count in (1000, 0, 33)] + [SPECIAL]
    for factor in (1 / 3, 1e-40, 1e38):
        yield "scale", pieces, factor, Out(sum(map(len, pieces)), dtype)
    yield "concatenate", pieces
    yield "concatenate", [draw.words(70), draw.words(1), draw.words(0)]
    yield "view", SPECIAL, np.int32
    yield "view", draw.words(9), np.float32
    for workers in (3, 1):
        yield "mean", list(draw.normal(workers, 5000))
    for count, broken in ((0, []), (1, [True]), (3000, [True, False, True]), (2048, [False, True])):
        yield "with_nan_tiles", as_type(np.resize(SPECIAL, count), dtype), np.array(broken, bool)
    for count in (0, 1, 31, 32, 33, 600):
        flags = draw.rng.random(count) < 0.3
        words = yield "pack_flags", flags
        yield "unpack_flags", words, count


# ---- uniform and exponential levels


@topic(60, quick=(1, 6, 11))
def uniform_sums(draw: Draw) -> Script:
    """Of each width and type."""
    width = 2 + draw.number % 15
    levels = max(1, ((1 << (width - 1)) - 1) // draw.pick(1, 2, 3, 9))
    for _ in range(2):
        x, norms, bucket_size, start = draw.gradient()
        key = draw.key()
        yield "round_uniform", x, norms, bucket_size, draw.pick(levels, MAX_LEVELS), key, start
        words = yield "encode_uniform_sum", x, norms, bucket_size, levels, width, key, start
        yield "encode_uniform_sum", x, norms, bucket_size, 1, width, key, start, Out(len(words), np.int32)
        for packed in (words, draw.words(len(words))):
            how = (bucket_size, levels, width, draw.factor())
            yield "decode_uniform_sum", packed, norms, *how, draw.out(len(x))


def codes_of(draw: Draw, levels: str, bits: int) -> Script:
    workers = draw.cycle(1, 3, 2, 5, 4, 7)
    for _ in range(2):
        x, norms, bucket_size, start = draw.gradient()
        arguments = (x, norms, bucket_size, bits, draw.key(), start)
        words = yield f"encode_{levels}", *arguments
        yield f"encode_{levels}", *arguments, Out(len(words), np.int32)
        everybody = [words, *(draw.words(len(words)) for _ in range(1, workers))]
        all_norms = [np.roll(norms, worker) for worker in range(workers)]
        yield f"decode_{levels}", everybody, all_norms, bucket_size, bits, draw.factor(), draw.out(len(x))
        workers = 1


@topic(60, quick=(1, 6, 11))
def uniform_codes(draw: Draw) -> Script:
    yield from codes_of(draw, "uniform_codes", 2 + draw.number % 15)


@topic(42, quick=(1, 2, 6))
def exponential_codes(draw: Draw) -> Script:
    bits = 2 + draw.number % 7
    x, norms, bucket_size, start = draw.gradient()
    digits = yield "round_exponential", x, norms, bucket_size, bits, draw.key(), start
    yield "exponential_values", digits, bits
    yield from codes_of(draw, "exponential", bits)


@topic(4, quick=(0, 3))
def codes_of_what_is_not_finite(draw: Draw) -> Script:
    """The sign of a NaN goes into the code, and that of infinity times zero is the processor's."""
    bucket = np.zeros(32, np.float32)
    bucket[: 2 * len(NOT_FINITE) + len(SPECIAL)] = np.concatenate([NOT_FINITE, -NOT_FINITE, SPECIAL])
    x, norms = as_type(np.tile(bucket, 3), draw.cycle(*DTYPES)), np.array([0, 1, np.inf], np.float32)
    words = yield "encode_exponential", x, norms, 32, 4, KEY
    digits = reference.digits_of_codes(reference.unpack_codes(words, 4, 96), 4)
    assert digits[69] < 0 or x.dtype == BFLOAT16, "the code of -NaN; a conversion to bfloat16 drops its sign"
    yield "encode_uniform_codes", x, norms, 32, 4, KEY
    yield "encode_uniform_sum", x, norms, 32, 7, 4, KEY


@topic(4, quick=(0, 3))
def last_random_bit(draw: Draw) -> Script:
    """Elements that their random bits just lift to the next level, or just do not."""
    bits = draw.cycle(2, 3, 8, 9)
    levels = reference.uniform_levels(bits)
    x, norms = on_the_edge(levels, KEY)
    digits = yield "round_uniform", x, norms, 4096, levels, KEY
    assert digits[::8].all()
    assert not digits[4::8].any()
    yield "encode_uniform_sum", x, norms, 4096, levels, bits, KEY
    yield "encode_uniform_codes", x, norms, 4096, bits, KEY


@topic(2, quick=(0, 1), backends=("tensorflow",))
def many_levels(draw: Draw) -> Script:
    """Few random bits: the last bits of the products, and subnormal elements of the smallest norms, count."""
    scale = draw.cycle(1.0, 2.0**-126)
    x = (draw.rng.uniform(-1, 1, 100_000) * scale).astype(np.float32)
    norms = np.full(buckets(len(x), 1024), max(1, 2.0**-96 / scale) * scale, np.float32)
    yield "round_uniform", x, norms, 1024, (1 << 20) - 1, KEY


DECODED: list[tuple[str, int, int, float | None]] = [
    *product(("decode_uniform_codes", "decode_exponential"), (4, 8), (1, 2, 4, 6, 8, 12, 32), (None,)),
    *product(("decode_uniform_codes",), (2, 3, 4, 5, 8, 12, 16), (3, 8), (2.0**-96, 2.0**-97, 2.0**-149)),
]
"""Kernel, bits, rows of a bucket, and the smallest norm of one level, or None for special norms."""


@topic(len(DECODED), quick=())
def decoders(draw: Draw) -> Script:
    """Of buckets with and without whole words, of norms just large enough to be made smaller, and of negative zeros."""
    kernel, bits, rows, smallest = draw.cycle(*DECODED)
    some = np.abs(np.concatenate([SPECIAL, NOT_FINITE]))
    if smallest is not None:
        units = smallest * np.linspace(1, 2, 17) * (1 + 2.0**-23)
        some = np.float32([*(reference.uniform_levels(bits) * units), 0, np.inf, np.nan])
    count, bucket_size = 3 * TILE + 7 * ROW + 5, rows * ROW
    negative_zeros = reference.pack_codes(np.full(count, 1 << (bits - 1), np.uint32), bits)
    for workers, factor in [(1, -2.0), (1, 1.0), (2, 1 / 3), (3, -0.25), (4, -1.0), (5, 1e38)]:
        words = list(draw.words(workers * code_words(count, bits)).reshape(workers, -1))
        norms = draw.rng.random((workers, buckets(count, bucket_size)), np.float32)
        norms[:, ::3] = draw.rng.choice(some, norms[:, ::3].shape)
        for sent in (words, [negative_zeros] * workers):
            yield kernel, sent, list(norms), bucket_size, bits, factor, Out(count, np.float32)


@topic(4, quick=(0, 1, 2, 3))
def types_to_decode_to(draw: Draw) -> Script:
    """Products and factors that are subnormal in each type, or overflow it."""
    dtype, rng = draw.cycle(*DTYPES), draw.rng
    norms = list((rng.uniform(1, 2, (2, 128)) * 2.0 ** rng.integers(-152, 20, (2, 128))).astype(np.float32))
    words = [draw.words(code_words(4096, 8)) for _ in range(2)]
    for factor in (1.0, 2.0**-20, 2.0**120, 2.0**-140, 1e300):
        yield "decode_uniform_codes", words, norms, 32, 8, factor, Out(4096, dtype)
        yield "decode_exponential", words, norms, 32, 8, factor, Out(4096, dtype)


@topic(1)
def longer_words_and_norms_than_needed_are_cut(draw: Draw) -> Script:
    words, norms = [draw.words(512)], [np.ones(9, np.float32)]
    yield "decode_uniform_codes", words, norms, 32, 4, 1.0, Out(100, np.float32)


@topic(1)
def ties_of_subnormal_quotients(draw: Draw) -> Script:
    """Half-way between two subnormal numbers: a multiplication by a rounded 1/98 would miss some."""
    norms = (98 * np.arange(1, 2001, 2) * 2.0**-150).astype(np.float32)
    yield "decoding_scales", norms, 98, 1.0
    norms, count = norms[:128], 32 * 128
    words = reference.pack_sum(np.ones(count, np.int32), 8)
    yield "decode_uniform_sum", words, norms, 32, 98, 8, 1.0, Out(count, np.float32)
