"""The TensorFlow kernels return the reference's bits: eager, in a function, in a TF1 graph, and compiled by XLA."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from helpers import (  # noqa: E402
    SCHEMES,
    buckets_of_all_sizes,
    by_default,
    extended,
    gaussian,
    in_turn,
    lockstep,
    on_the_edge,
    owned_states,
)
from literature import LITERATURE  # noqa: E402

from horovod_quant.kernels import keys, reference, trellis  # noqa: E402
from horovod_quant.kernels.keys import Key  # noqa: E402
from horovod_quant.kernels.layout import ROW, TILE, buckets, code_words, sum_words, tiles  # noqa: E402
from horovod_quant.kernels.rotation import LEVELS, rotated_elements  # noqa: E402
from horovod_quant.schemes import Hierarchical  # noqa: E402
from horovod_quant.schemes.base import Allgather, Allreduce, BinaryState, Gradient, Workers  # noqa: E402
from horovod_quant.tensorflow import kernels  # noqa: E402
from horovod_quant.tensorflow.segments import FlatVariable  # noqa: E402
from horovod_quant.tensorflow.trellis import trellis_codes  # noqa: E402
from horovod_quant.transports import simulator  # noqa: E402

KEY = Key(0x12345678, 0x9ABCDEF0)
BFLOAT16 = np.uint16
FACTORS = (1.0, 1 / 3, -2.0, 1e-30, 1e38, 0.25)
TINY = np.array([0, -0.0, 1e-45, -1e-40, 2.0**-126, -(2.0**-126), 2.0**-127, 2.0**-96], np.float32)
SPECIAL = np.concatenate([TINY, np.array([1e-30, 2.0**-24, -1, 65519, 65520, -1e38, 3.4e38], np.float32)])
NOT_FINITE = np.array([np.inf, -np.inf, np.nan], np.float32)

Scenario = Callable[..., Sequence[Any]]


# ---- one computation, by the reference and by TensorFlow in each of its ways


def eagerly(function: Callable) -> Callable:
    return function


WAYS = {
    "eager": eagerly,
    "function": tf.function(autograph=False),
    "xla": tf.function(autograph=False, jit_compile=True),
}


@pytest.fixture(params=by_default(["function"], WAYS))
def way(request: pytest.FixtureRequest) -> Callable:
    """To run a computation in; a test with many cases names it among its parameters."""
    return WAYS[request.param]


def to_tensor(array: Any) -> Any:
    if isinstance(array, list):
        return [to_tensor(one) for one in array]
    if array.dtype == BFLOAT16:
        array = array.view(tf.bfloat16.as_numpy_dtype)
    return tf.constant(array)


def to_numpy(tensor: Any) -> np.ndarray:
    array = tensor.numpy()
    return array.view(BFLOAT16) if tensor.dtype == tf.bfloat16 else array


def array_of(count: int, dtype: Any) -> np.ndarray:
    return np.full(count, 77, dtype)


def spec_of(count: int, dtype: Any) -> Any:
    return tf.TensorSpec([count], tf.bfloat16 if dtype == BFLOAT16 else dtype)


def assert_same(way: Callable, scenario: Scenario, *inputs: Any) -> None:
    """``scenario(backend, out, *inputs)`` returns the same bits from both backends."""
    with np.errstate(all="ignore"):
        expected = scenario(reference, array_of, *inputs)
    tensors = [to_tensor(one) for one in inputs]  # arguments, so that no compiler folds them
    actual = way(lambda *arguments: scenario(kernels, spec_of, *arguments))(*tensors)
    assert len(expected) == len(actual)
    for number, (one, other) in enumerate(zip(expected, actual)):
        assert_same_bits(one, to_numpy(other), f"result {number} of {scenario.__name__}")


def assert_same_bits(expected: np.ndarray, actual: np.ndarray, what: str) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    differ = bits_of(expected) != bits_of(actual)
    if expected.dtype.kind == "f":
        differ &= ~(np.isnan(expected) & np.isnan(actual))
    at = np.flatnonzero(differ)
    assert not len(at), (
        f"{what}: {len(at)} of {len(actual)}, at {at[:5]}: {actual[at[:5]]}, not {expected[at[:5]]}"
    )


def bits_of(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")


# ---- inputs


class Input(NamedTuple):
    """A gradient, norms that are mostly its own, and the size of the buckets."""

    x: np.ndarray
    norms: np.ndarray
    bucket_size: int


def make_input(count: int, bucket_size: int, dtype: Any, seed: int) -> Input:
    """Buckets of very different scales; zeros, subnormal and huge numbers; some not finite; some norms of others."""
    rng = np.random.default_rng(seed)
    bucket_count = buckets(count, bucket_size)
    scales = np.repeat(2.0 ** rng.integers(-150, 120, bucket_count), bucket_size)[:count]
    scales[rng.random(count) < 0.3] = 1
    x = (rng.standard_normal(count) * scales).astype(np.float32)
    odd = rng.random(count) < 0.2
    x[odd] = rng.choice(SPECIAL, int(odd.sum()))
    if count > 100:
        x[rng.integers(count)] = rng.choice(NOT_FINITE)
    values = x.astype(np.float64) * (1 + 2.0**-30) if dtype == np.float64 else as_type(x, dtype)
    norms = reference.bucket_maxima(values, bucket_size)
    strange = rng.random(bucket_count) < 0.3
    norms[strange] = np.abs(rng.choice(np.concatenate([SPECIAL, NOT_FINITE]), int(strange.sum())))
    return Input(values, norms, bucket_size)


def as_type(x: np.ndarray, dtype: Any) -> np.ndarray:
    return reference.store_float32(x, np.empty(len(x), dtype))


def any_words(count: int, seed: int) -> np.ndarray:
    """What no encoder wrote: decoders agree on any words."""
    return np.random.default_rng(seed).integers(-(2**31), 2**31, count).astype(np.int32)


CASES = [
    # elements, bucket size, dtype, bits
    (0, 32, np.float32, 2),
    (1, 96, np.float16, 3),
    (31, 32, BFLOAT16, 4),
    (33, 1024, np.float64, 5),
    (1000, 96, np.float32, 6),
    (1024, 32, BFLOAT16, 7),
    (5000, 96, np.float32, 8),
    (4999, 2048, np.float32, 16),
]
MORE_CASES = [
    (5000, 32, np.float64, 2),
    (5000, 1024, np.float16, 4),
]
cases = pytest.mark.parametrize(
    ("way", "count", "bucket_size", "dtype", "bits"),
    [*in_turn(list(WAYS), CASES), *(extended(way, *case) for case in MORE_CASES for way in WAYS)],
    indirect=["way"],
    ids=lambda value: (
        str(value) if isinstance(value, (int, str)) else "bfloat16" if value == BFLOAT16 else value.__name__
    ),
)


# ---- norms, levels


@cases
def test_norms(way: Callable, count: int, bucket_size: int, dtype: Any, bits: int) -> None:
    given = make_input(count, bucket_size, dtype, count)

    def norms(backend, out, x, own):
        sums = backend.bucket_square_sums(x, bucket_size)
        return [
            backend.bucket_maxima(x, bucket_size),
            sums,
            backend.norms_of_square_sums(sums),
            backend.inverse_norms(own, 1.0),
            backend.inverse_norms(own, 127 << 24),
            *(backend.decoding_scales(own, (1 << bits) - 1, factor) for factor in FACTORS),
        ]

    assert_same(way, norms, given.x, given.norms)


@pytest.mark.parametrize("count", [33, 1025])
def test_a_bucket_that_is_larger_than_any_tensor(way: Callable, count: int) -> None:
    given = make_input(count, 1024, np.float32, count)

    def kernels_with_buckets(backend, out, x):
        largest = backend.bucket_maxima(x, 2**40)
        return [
            largest,
            backend.bucket_square_sums(x, 2**40),
            backend.round_uniform(x, largest, 2**40, 7, KEY),
            backend.round_exponential(x, largest, 2**40, 4, KEY),
        ]

    assert_same(way, kernels_with_buckets, given.x)


@pytest.mark.parametrize("count", [0, 1, 1024, 3100])
@pytest.mark.parametrize("broken", [False, True])
def test_clipping(way: Callable, count: int, broken: bool) -> None:
    x = gaussian(count, count)
    if broken:
        x[: count // 2 : 7] = np.nan

    def clipped(backend: Any, out: Any, x: Any) -> list[Any]:
        return [backend.clip(x, most) for most in (1e-30, 0.01, 1.0, 1e6)]

    assert_same(way, clipped, x)


@cases
def test_sums_and_statistics(way: Callable, count: int, bucket_size: int, dtype: Any, bits: int) -> None:
    given = make_input(count, bucket_size, dtype, count)
    finite = np.where(np.isfinite(reference.as_float32(given.x)), given.x, np.zeros(1, given.x.dtype))

    def statistics(backend, out, *tensors):
        return [
            result
            for x in tensors
            for result in (
                backend.bucket_sums(x, bucket_size),
                backend.bucket_magnitude_sums(x, bucket_size),
                backend.tensor_maximum(x),
                backend.tensor_mean_magnitude(x),
                backend.tensor_deviation(x),
            )
        ]

    assert_same(way, statistics, given.x, finite.astype(given.x.dtype))


@pytest.mark.parametrize("count", [3000])
def test_statistics_of_ordinary_gradients(way: Callable, count: int) -> None:
    """A contraction of a product and a sum, or a division by a rounded inverse, would show in the deviation."""

    def statistics(backend, out, tensors):
        return [
            result
            for x in tensors
            for result in (backend.tensor_mean_magnitude(x), backend.tensor_deviation(x))
        ]

    scales = 10.0 ** np.array([-40, -22, -3, 0, 1, 35])
    gradients = [
        ((gaussian(count + i, count) + i % 3) * scale).astype(np.float32) for i, scale in enumerate(scales)
    ]
    assert_same(way, statistics, gradients)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, BFLOAT16])
def test_comparisons_choices_and_minima(way: Callable, dtype: Any) -> None:
    values = np.concatenate([SPECIAL, NOT_FINITE, -NOT_FINITE])
    a, b = (as_type(pair.reshape(-1), dtype) for pair in np.meshgrid(values, values))

    def arithmetic(backend, out, a, b):
        found = [backend.next_powers_of_two(a)]
        for other in (b, b[7:8], b[-1:], 1e-45, -0.0, np.nan, 1e300):
            flags = backend.less(a, other)
            found += [flags, backend.minimum(a, other), backend.where(flags, a, other)]
            found.append(backend.where(flags, other, 3.0))
        return found

    assert_same(way, arithmetic, a, b)


def test_operands_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="an array of 2 elements beside one of 5"):
        kernels.minimum(tf.ones(5), tf.ones(2))
    with pytest.raises(ValueError, match="an array of 2 elements beside one of 5"):
        kernels.where(tf.ones(5) > 0, tf.ones(2), 0.0)


@pytest.mark.parametrize("bits", [2, 9])
def test_the_last_random_bit_decides(way: Callable, bits: int) -> None:
    levels = reference.uniform_levels(bits)

    def encoded(backend, out, x, norms):
        return [
            backend.round_uniform(x, norms, 4096, levels, KEY),
            backend.encode_uniform_sum(x, norms, 4096, levels, bits, KEY),
            backend.encode_uniform_codes(x, norms, 4096, bits, KEY),
        ]

    assert_same(way, encoded, *on_the_edge(levels, KEY))


@cases
def test_uniform_levels(way: Callable, count: int, bucket_size: int, dtype: Any, bits: int) -> None:
    given = make_input(count, bucket_size, dtype, count + 1)
    sums = any_words(sum_words(count, bits), 1)
    codes = [any_words(code_words(count, bits), seed) for seed in range(3)]
    everybody = [np.roll(given.norms, worker) for worker in range(3)]
    levels = reference.uniform_levels(bits)
    start = 96 * 1024 * 2**26  # beyond 2^32

    def uniform(backend, out, x, norms, sums, codes, everybody):
        results = [
            backend.round_uniform(x, norms, bucket_size, levels, KEY),
            backend.round_uniform(x, norms, bucket_size, 1, KEY, start),
            backend.encode_uniform_sum(x, norms, bucket_size, levels, bits, KEY, start),
            backend.encode_uniform_codes(x, norms, bucket_size, bits, KEY, start),
        ]
        for factor in FACTORS[bits % 2 :: 2]:
            results += [
                backend.decode_uniform_sum(sums, norms, bucket_size, levels, bits, factor, out(count, dtype)),
                backend.decode_uniform_codes(codes, everybody, bucket_size, bits, factor, out(count, dtype)),
            ]
        return results

    assert_same(way, uniform, given.x, given.norms, sums, codes, everybody)


@pytest.mark.parametrize("scale", [1.0, 2.0**-126])
def test_many_levels(way: Callable, scale: float) -> None:
    """Few random bits: the last bits of the products, and subnormal elements of the smallest norms, count."""
    x = (np.random.default_rng(2).uniform(-1, 1, 100_000) * scale).astype(np.float32)
    norms = np.full(buckets(len(x), 1024), max(1, 2.0**-96 / scale) * scale, np.float32)

    def rounded(backend, out, x, norms):
        return [backend.round_uniform(x, norms, 1024, (1 << 20) - 1, KEY)]

    assert_same(way, rounded, x, norms)


@cases
def test_exponential_levels(way: Callable, count: int, bucket_size: int, dtype: Any, bits: int) -> None:
    bits = min(bits, 8)
    given = make_input(count, bucket_size, dtype, count + 2)
    codes = [any_words(code_words(count, bits), seed) for seed in range(3)]
    everybody = [np.roll(given.norms, worker) for worker in range(3)]

    def exponential(backend, out, x, norms, codes, everybody):
        digits = backend.round_exponential(x, norms, bucket_size, bits, KEY, 96 * 1024)
        results = [
            digits,
            backend.exponential_values(digits, bits),
            backend.encode_exponential(x, norms, bucket_size, bits, KEY, 96 * 1024),
        ]
        for factor, workers in zip(FACTORS[bits % 2 :: 2], (1, 2, 3)):
            own_codes, own_norms = codes[:workers], everybody[:workers]
            results.append(
                backend.decode_exponential(own_codes, own_norms, bucket_size, bits, factor, out(count, dtype))
            )
        return results

    assert_same(way, exponential, given.x, given.norms, codes, everybody)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, BFLOAT16])
def test_each_type_to_decode_to(way: Callable, dtype: Any) -> None:
    """Norms and factors whose products are subnormal in each type, or overflow it."""
    rng = np.random.default_rng(5)
    count, bucket_size = 4096, 32
    words = [any_words(code_words(count, 8), seed) for seed in range(2)]
    scales = [
        (rng.uniform(1, 2, count // 32) * 2.0 ** rng.integers(-152, 20, count // 32)).astype(np.float32)
        for _ in words
    ]

    def decode(backend, out, words, scales):
        return [
            backend.decode_uniform_codes(words, scales, bucket_size, 8, 1.0, out(count, dtype)),
            backend.decode_uniform_codes(words, scales, bucket_size, 8, 2.0**-20, out(count, dtype)),
            backend.decode_exponential(words, scales, bucket_size, 8, 2.0**120, out(count, dtype)),
        ]

    assert_same(way, decode, words, scales)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, BFLOAT16])
def test_conversions(way: Callable, dtype: Any) -> None:
    rng = np.random.default_rng(6)
    values = (rng.standard_normal(4096) * 2.0 ** rng.integers(-30, 20, 4096)).astype(np.float32)
    values[:6] = [65504, 65519, 65520, -65520, np.inf, np.nan]
    x = array_of(4096, dtype)
    reference.store_float32(values, x)

    def convert(backend, out, x):
        places = (out(4096, np.float16), out(4096, np.float32)) if backend is reference else (None, None)
        return [backend.to_float16(x, places[0]), backend.to_float32(x, places[1])]

    assert_same(way, convert, x)


def test_exact_ties_of_a_subnormal_quotient(way: Callable) -> None:
    """Half-way between two subnormal numbers: a multiplication by a rounded 1/98 would miss some."""
    norms = (98 * np.arange(1, 4001, 2) * 2.0**-150).astype(np.float32)
    assert_same(way, lambda backend, out, norms: [backend.decoding_scales(norms, 98, 1.0)], norms)


def test_every_short_float(way: Callable) -> None:
    """All float16 and bfloat16 numbers are read as the reference reads them."""
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)

    def read(backend, out, half, brain):
        return [backend.bucket_maxima(half, 32), backend.bucket_maxima(brain, 32)] + [
            backend.bucket_square_sums(x, 32) for x in (half, brain)
        ]

    assert_same(way, read, every.view(np.float16), every)


@pytest.mark.parametrize("bucket_size", [8 * 1024, 32 * 1024])
def test_squares_are_added_row_by_row(way: Callable, bucket_size: int) -> None:
    """A chain of additions and a loop. From the first row on each tiny square is lost; together they would count."""
    x = make_input(70_000, bucket_size, np.float32, 3).x
    x[~np.isfinite(x)] = 1
    first = x[:bucket_size].reshape(-1, ROW)
    first[:] = 0
    first[0, 0], first[1, 0], first[2:, 0] = 1, 2.0**-12 * (1 - 2.0**-24), 2.0**-27
    in_order, backwards = (
        reference.bucket_square_sums(rows.reshape(-1), bucket_size) for rows in (first, first[::-1])
    )
    assert in_order != backwards
    assert_same(way, lambda backend, out, x: [backend.bucket_square_sums(x, bucket_size)], x)


# ---- rotated

with_and_without_trellis = pytest.mark.parametrize("trellis", [False, True])


@cases
@with_and_without_trellis
def test_rotated(way: Callable, count: int, bucket_size: int, dtype: Any, bits: int, trellis: bool) -> None:
    bits = 1 + bits % 4
    given = make_input(count, bucket_size, dtype, count + 3)
    keys_of_all = [Key(rank, 7) for rank in range(3)]
    coordinates = rotated_elements(count)
    words = [any_words(code_words(coordinates, bits), seed) for seed in range(3)]
    scales = [np.roll(given.norms, worker)[: tiles(count)] for worker in range(3)]
    scales = [np.resize(own, tiles(count)).astype(np.float32) for own in scales]
    start = 96 * 1024 * 2**26  # beyond 2^32

    def rotated(backend, out, x, words, scales):
        return [
            *backend.encode_rotated(x, bits, KEY, start, trellis=trellis),
            *backend.encode_rotated(x, bits, joint_keys()[1], trellis=trellis),
            backend.decode_rotated(
                words[0], scales[0], bits, KEY, FACTORS[1 + bits], out(count, dtype), start, trellis
            ),
            backend.add_rotated(words, scales, bits, keys_of_all, 1 / 3, out(count, dtype), trellis=trellis),
            backend.add_rotated(
                words[:1], scales[:1], bits, keys_of_all[:1], 1.0, out(count, np.float16), 0, trellis
            ),
        ]

    assert_same(way, rotated, given.x, words, scales)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@with_and_without_trellis
def test_rotated_numbers_of_all_sizes(way: Callable, bits: int, trellis: bool) -> None:
    def rotated(backend, out, x):
        words, scales = backend.encode_rotated(x, bits, KEY, trellis=trellis)
        decoded = out(x.shape[0], np.float32)
        return [
            words,
            scales,
            backend.decode_rotated(words, scales, bits, KEY, 0.5, decoded, trellis=trellis),
        ]

    assert_same(way, rotated, buckets_of_all_sizes(bits))


@pytest.mark.parametrize("size", [32, 64, 128, 256, 512])
@with_and_without_trellis
def test_rotated_short_buckets(way: Callable, size: int, trellis: bool) -> None:
    bits = 1 + size.bit_length() % 4

    def rotated(backend, out, x):
        words, scales = backend.encode_rotated(x, bits, KEY, trellis=trellis)
        decoded = out(size, np.float16)
        return [
            words,
            scales,
            backend.decode_rotated(words, scales, bits, KEY, 1.0, decoded, trellis=trellis),
        ]

    assert_same(way, rotated, gaussian(size, size))


@pytest.mark.parametrize("size", [64, TILE])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_paths_whose_sums_are_all_but_equal(way: Callable, bits: int, size: int) -> None:
    """A product that is not rounded before it is added leads to another path in some of the lanes."""
    z, units = between_two_paths(bits, size)

    def paths(backend, out, z, units):
        if backend is reference:
            return [trellis.trellis_codes(z, units, bits, LEVELS[bits]).reshape(-1)]
        return [tf.reshape(trellis_codes(z, units, bits, LEVELS[bits]), [-1])]

    assert_same(way, paths, z, units)


def between_two_paths(bits: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates and units of buckets, in pairs: their last rows differ in a last digit, and so do all their paths."""
    pairs = 32
    units = np.linspace(5, 90, pairs, dtype=np.float32)
    low = gaussian(bits, pairs, size) * units[:, None]
    high = low.copy()
    low[:, -ROW:], high[:, -ROW:] = -units[:, None], units[:, None]

    def paths(z: np.ndarray) -> np.ndarray:
        return trellis.trellis_codes(z, units, bits, LEVELS[bits]).reshape(pairs, -1, ROW)

    path_of_low = paths(low)
    for _ in range(60):
        middle = low.copy()
        middle[:, -ROW:] = (low[:, -ROW:] + high[:, -ROW:]) / 2
        same = (paths(middle) == path_of_low).all(axis=1)
        low[:, -ROW:] = np.where(same, middle[:, -ROW:], low[:, -ROW:])
        high[:, -ROW:] = np.where(same, high[:, -ROW:], middle[:, -ROW:])
    return np.concatenate([low, high]), np.concatenate([units, units])


def test_rotated_arrays_that_do_not_fit() -> None:
    spec = tf.TensorSpec([2000], tf.float32)
    words, scales = tf.zeros([code_words(2048, 2)], tf.int32), tf.ones([2])
    with pytest.raises(ValueError, match="1 scales for 2000 elements; 2 are needed"):
        kernels.decode_rotated(words, scales[:1], 2, KEY, 1.0, spec)
    with pytest.raises(ValueError, match="words cannot hold"):
        kernels.decode_rotated(words[:64], scales, 2, KEY, 1.0, spec)
    with pytest.raises(ValueError, match="bits=5: use 1 to 4"):
        kernels.encode_rotated(tf.ones(5), 5, KEY)
    with pytest.raises(ValueError, match="1 workers' words, 1 workers' scales, 2 keys"):
        kernels.add_rotated([words], [scales], 2, [KEY, KEY], 1.0, spec)


# ---- one bit


@pytest.mark.parametrize(
    ("count", "dtype", "beta"),
    [(0, np.float32, 0.9), (33, np.float16, 0.0), (5000, np.float32, 0.9), (5000, BFLOAT16, 0.999)],
)
def test_binarized(way: Callable, count: int, dtype: Any, beta: float) -> None:
    x = make_input(count, 32, dtype, count).x
    scale, momentum = state_of(count)

    def one_bit(backend, out, x, momentum, scale):
        if backend is kernels:
            return backend.binarized(x, momentum, scale, beta, KEY, TILE)
        momentum, scale = momentum.copy(), scale.copy()
        return [*backend.binarize(x, momentum, scale, beta, KEY, TILE), momentum, scale]

    assert_same(way, one_bit, x, momentum, scale)


def test_a_draw_that_rounds_to_the_momentum(way: Callable) -> None:
    """``uniform * scale`` is rounded before it is compared: a draw of exactly the momentum is no 1."""
    count = 5 * TILE
    scale = np.random.default_rng(1).uniform(1, 2, count).astype(np.float32)
    uniform = (keys.hash32(0, count, KEY).view(np.int32) >> 8) * 2.0**-23
    momentum = (uniform * scale).astype(np.float32)

    def one_bit(backend, out, x, momentum, scale):
        binarize = backend.binarize if backend is reference else backend.binarized
        return [binarize(x, momentum, scale, 1.0, KEY)[0]]

    assert_same(way, one_bit, np.zeros(count, np.float32), momentum, scale)


def state_of(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    scale = np.abs(rng.standard_normal(count) * 2.0 ** rng.integers(-150, 100, count)).astype(np.float32)
    odd = rng.random(count) < 0.2
    scale[odd] = np.abs(rng.choice(SPECIAL, int(odd.sum())))
    return scale, (scale * rng.choice(np.array([-1, -0.3, 0, 1], np.float32), count)).astype(np.float32)


@pytest.mark.parametrize("kind", [*WAYS, "graph"])
def test_binarize_updates_variables_of_any_shape(kind: str) -> None:
    x = make_input(3000, 32, np.float32, 7).x
    scale, momentum = state_of(3000)
    expected_momentum, expected_scale = momentum.copy(), scale.copy()
    steps = []
    with np.errstate(all="ignore"):
        for step in range(2):
            key = Key(step, 5)
            steps.append(reference.binarize(x, expected_momentum, expected_scale, 0.9, key))

    graph = tf.Graph() if kind == "graph" else None
    with graph.as_default() if graph else contextlib.nullcontext():
        variables = [tf.Variable(array.reshape(30, 100)) for array in (momentum, scale)]
        way = WAYS.get(kind, eagerly)
        binarize = way(lambda g, k0: kernels.binarize(g, *variables, 0.9, Key(k0, 5)))
        if graph:
            gradient = tf.compat.v1.placeholder(tf.float32, [3000])
            k0 = tf.compat.v1.placeholder(tf.uint32, [])
            words, broken = binarize(gradient, k0)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                actual = [
                    (session.run(words, {gradient: x, k0: 0}), steps[0][1]),  # the words alone
                    session.run((words, broken), {gradient: x, k0: 1}),
                ]
                left = session.run(variables)
        else:
            results = [binarize(tf.constant(x), tf.constant(step, tf.uint32)) for step in range(2)]
            actual = [(words.numpy(), broken.numpy()) for words, broken in results]
            left = [variable.numpy() for variable in variables]
    for (words, broken), (own_words, own_broken) in zip(steps, actual):
        assert_same_bits(words, own_words, "words")
        assert_same_bits(broken, own_broken, "broken")
    assert_same_bits(expected_momentum, left[0].reshape(-1), "momentum")
    assert_same_bits(expected_scale, left[1].reshape(-1), "scale")


@pytest.mark.parametrize(
    ("tile_count", "workers", "dtype"), [(0, 1, np.float32), (2, 3, BFLOAT16), (1, 300, np.float16)]
)
def test_vote_and_signs(way: Callable, tile_count: int, workers: int, dtype: Any) -> None:
    words = [any_words(tile_count * ROW, seed) for seed in range(workers)]
    count = max(0, tile_count * TILE - 100)

    def signs(backend, out, words):
        result = backend.vote(words, KEY, 5 * TILE)
        magnitudes = (1.0, -0.3, 0.0, 1e38, 1e-41, 3e-45, 65519.999)
        return [result, *(backend.decode_signs(result, value, out(count, dtype)) for value in magnitudes)]

    assert_same(way, signs, words)


# ---- keys


def joint_keys() -> list[Key]:
    """Of both workers of a pair, and of the third of three."""
    chain = keys.RngKey(3, "w")
    return [chain.joint("worker", 5, rank, size) for rank, size in ((0, 2), (3, 8), (2, 3))]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_joint_rounding(way: Callable, dtype: Any) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal(3000).astype(np.float32)
    x[:6] = [0.0, -0.0, np.nan, -np.inf, 1e-40, -1e-40]
    x = x.astype(dtype)

    def rounded(backend, out, x):
        norms = backend.bucket_maxima(x[64:], 64)
        norms = backend.concatenate([np.float32([np.inf]), norms])
        return [
            found
            for key in joint_keys()
            for found in (
                backend.round_uniform(x, norms, 64, 7, key),
                backend.encode_uniform_sum(x, norms, 64, 31, 8, key, 64),
                backend.encode_exponential(x, norms, 64, 4, key),
                backend.round_exponential(x, norms, 64, 8, key),
            )
        ]

    assert_same(way, rounded, x)


@pytest.mark.parametrize("rank", range(5))
def test_joint_keys_of_tensors(way: Callable, rank: int) -> None:
    plain, chain = keys.RngKey(5, "w"), kernels.RngKey(5, "w")
    joint = way(lambda step: chain.joint("worker", step, rank, 5)[:2])
    for step in (0, 2**40):
        expected = plain.joint("worker", step, rank, 5)
        assert tuple(map(int, joint(tf.constant(step, tf.int64)))) == expected[:2]
        assert chain.joint("worker", tf.constant(step, tf.int64), rank, 5)[2:] == expected[2:]


@pytest.mark.parametrize("seed", [0, -1, 2**70 + 3])
def test_keys_of_tensors(way: Callable, seed: int) -> None:
    plain, chain = keys.RngKey(seed, "layer/weight"), kernels.RngKey(seed, "layer/weight")
    assert (chain.seed, chain.name) == (seed, "layer/weight")
    of_both = way(lambda step, worker: chain.key("worker", step, worker))
    of_step = way(lambda step: chain.key("server", step))
    of_worker = way(lambda worker: chain.key("worker", 7, worker))
    word, of_word = way(kernels.step_word), way(lambda word: kernels.key_of_word(chain, "worker", word, 7))
    rng = np.random.default_rng(3)
    steps = [0, 1, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**63 - 1, *rng.integers(0, 2**62, 20).tolist()]
    for step in steps:
        worker = step % 1000
        tensor, worker_tensor = tf.constant(step, tf.int64), tf.constant(worker, tf.int64)
        assert values_of(of_both(tensor, worker_tensor)) == plain.key("worker", step, worker)
        assert values_of(of_step(tensor)) == plain.key("server", step)
        assert values_of(of_worker(worker_tensor)) == plain.key("worker", 7, worker)
        assert_same_bits(reference.step_word(step), word(tensor).numpy(), "word")
        assert values_of(of_word(word(tensor))) == plain.key("worker", step % 2**32, 7)


def values_of(key: Key) -> Key:
    assert key.k0.dtype == key.k1.dtype == tf.uint32
    return Key(int(key.k0), int(key.k1))


def test_keys_of_integers_and_variables() -> None:
    plain, chain = keys.RngKey(3, "w"), kernels.RngKey(3, "w")
    assert chain.key("worker", 5, 2) == plain.key("worker", 5, 2)
    assert chain.key("worker", np.int64(5), np.int32(2)) == plain.key("worker", 5, 2)
    assert values_of(chain.key("worker", tf.Variable(5, dtype=tf.int64))) == plain.key("worker", 5)
    assert values_of(chain.key("worker", 5, tf.constant(2))) == plain.key("worker", 5, 2)
    assert kernels.step_word(5).numpy().tolist() == [5]


def test_hash(way: Callable) -> None:
    def hashes(backend, out, k0, k1):
        hash32 = keys.hash32 if backend is reference else backend.hash32
        key = Key(int(k0), int(k1)) if backend is reference else Key(k0, k1)
        found = []
        for start, count in ((0, 0), (0, 1), (37, 100), (2**32 - 50, 100), (2**40, 5)):
            found += [hash32(start, count, key), hash32(start, count, KEY)]
            found += [hash32(start, count, joint) for joint in joint_keys()]
            found += [hash32(start, count, key._replace(shift=1, addend=7, flip=keys.ALL_ONES))]
        return found

    assert_same(way, hashes, np.uint32(0xFFFFFFFF), np.uint32(0xFEDCBA98))


# ---- packing


@pytest.mark.parametrize(
    ("way", "counts"), in_turn(list(WAYS), [[(1024, 5000)], [(0, 1, 33)]]), indirect=["way"]
)
def test_packing(way: Callable, counts: Sequence[int]) -> None:
    rng = np.random.default_rng(len(counts))
    widths = range(1, 17) if max(counts) > 33 else (1, 2, 5, 16)
    pairs = [(width, count) for width in widths for count in counts]
    digits = [rng.integers(-(2**31), 2**31, count).astype(np.int32) for _, count in pairs]
    sums = [any_words(sum_words(count, width), width) for width, count in pairs]
    codes = [rng.integers(0, 1 << width, count).astype(np.uint32) for width, count in pairs]
    words = [any_words(code_words(count, width) + 40, width) for width, count in pairs]

    def packing(backend, out, digits, sums, codes, words):
        found = []
        for i, (width, count) in enumerate(pairs):
            found += [
                backend.pack_sum(digits[i], width),
                backend.unpack_sum(sums[i], width, count),
                backend.pack_codes(codes[i], width),
                backend.pack_codes(codes[i], width, None, True),
                backend.unpack_codes(words[i], width, count),
            ]
            if width > 1:
                own = backend.digits_of_codes(codes[i], width)
                found += [own, backend.codes_of_digits(own, width)]
        return found

    assert_same(way, packing, digits, sums, codes, words)


def test_words_that_cannot_hold_the_elements() -> None:
    with pytest.raises(ValueError, match="32 words cannot hold 2000 digits of 8 bits"):
        kernels.unpack_sum(tf.zeros([32], tf.int32), 8, 2000)
    with pytest.raises(ValueError, match="32 words cannot hold 2000 codes of 8 bits"):
        kernels.unpack_codes(tf.zeros([32], tf.int32), 8, 2000)


def test_buffers_and_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="no buffer"):
        kernels.bucket_maxima(tf.ones(5), 32, tf.ones(1))
    with pytest.raises(TypeError, match="int32"):
        kernels.bucket_maxima(tf.ones(5, tf.int32), 32)
    with pytest.raises(TypeError, match="int64"):
        kernels.decode_signs(tf.zeros([32], tf.int32), 1.0, tf.TensorSpec([5], tf.int64))


# ---- numbers known only when a graph runs


def test_factors_magnitudes_and_keys_as_tensors(way: Callable) -> None:
    count, bucket_size = 1000, 96
    given = make_input(count, bucket_size, np.float32, 1)
    words = any_words(code_words(count, 4), 1)

    def decode(backend, out, x, norms, words, factor, k0, k1):
        if backend is reference:
            factor, k0, k1 = float(factor), int(k0), int(k1)
        return [
            backend.encode_uniform_sum(x, norms, bucket_size, 7, 4, Key(k0, k1), bucket_size),
            backend.decode_uniform_codes([words], [norms], bucket_size, 4, factor, out(count, np.float32)),
            backend.decode_signs(words, factor, out(count, np.float32)),
        ]

    # The last, subnormal in float32, is a tensor of float32 as well.
    for factor in (
        np.float64(1 / 3),
        np.float64(1e-30),
        np.float64(1e300),
        np.float64(1e-41),
        np.float32(1e-41),
    ):
        assert_same(way, decode, given.x, given.norms, words, factor, np.uint32(KEY.k0), np.uint32(KEY.k1))


# ---- many elements: what is rare


def test_a_million_elements(way: Callable) -> None:
    count, bucket_size = 1_000_000, 1024
    rng = np.random.default_rng(11)
    x, momentum = rng.standard_normal((2, count)).astype(np.float32)
    scale = np.abs(rng.standard_normal(count)).astype(np.float32)
    norms = [rng.uniform(0.1, 10, buckets(count, bucket_size)).astype(np.float32) for _ in range(3)]
    words = [any_words(code_words(count, 4), seed) for seed in range(3)]

    def many(backend, out, x, momentum, scale, norms, words):
        own = [momentum, scale]
        if backend is kernels:
            bits, _, *own = backend.binarized(x, momentum, scale, 0.9, KEY)
        else:
            own = [momentum.copy(), scale.copy()]
            bits, _ = backend.binarize(x, *own, 0.9, KEY)
        return [
            bits,
            *own,
            backend.decode_uniform_codes(words, norms, bucket_size, 4, 1 / 3, out(count, np.float32)),
            backend.encode_uniform_sum(x, norms[0], bucket_size, 31, 8, KEY),
            backend.encode_exponential(x, norms[0], bucket_size, 4, KEY),
            backend.bucket_square_sums(x, bucket_size),
        ]

    assert_same(way, many, x, momentum, scale, norms, words)


# ---- what the schemes do with arrays


def test_assemble(way: Callable) -> None:
    inputs = [
        np.array([1e-41, -0.0, 3, np.nan], np.float32),
        any_words(70, 0),
        np.ones(3),
        np.zeros(0, np.int32),
    ]
    mixes = ([0, 1], [0, 0], [1], [2, 2], [], [3, 3, 1], [3])

    def assembled(backend, out, inputs):
        def part(number):
            return inputs[number].shape[0], inputs[number].dtype, lambda out: inputs[number]

        results = [backend.pack([part(number) for number in mix]) for mix in mixes]
        results += [backend.view(results[0][:4], np.float32), backend.concatenate([inputs[1], inputs[1]])]
        results.append(backend.pack([part(1), (2, np.int32, lambda out: np.ones(2, np.int32))]))
        return results

    assert_same(way, assembled, inputs)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 1000])
def test_flags(way: Callable, count: int) -> None:
    flags = np.random.default_rng(count).random(count) < 0.5
    packed = np.packbits(np.pad(flags, (0, -count % 32)), bitorder="little").view("<i4")
    words = way(kernels.pack_flags)(tf.constant(flags))
    assert_same_bits(packed.astype(np.int32), words.numpy(), "words")
    assert way(lambda words: kernels.unpack_flags(words, count))(words).numpy().tolist() == flags.tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, BFLOAT16])
def test_nan_tiles(way: Callable, dtype: Any) -> None:
    values = as_type(np.resize(SPECIAL, 3000), dtype)
    broken = np.array([False, True, False])
    expected = values.copy()
    reference.store_float32(np.full(1, np.nan, np.float32), expected[TILE : 2 * TILE])
    actual = way(kernels.with_nan_tiles)(to_tensor(values), tf.constant(broken))
    assert_same_bits(expected, to_numpy(actual), "values")
    assert tiles(len(values)) == len(broken)


def perform(requests: Sequence[Any], local_size: int) -> list[Any]:
    answers: list[Any] = [None] * len(requests)
    for ranks in simulator._members(requests[0].group, len(requests), local_size):
        for rank, answer in zip(ranks, performed([requests[rank] for rank in ranks])):
            answers[rank] = answer
    return answers


def performed(requests: Sequence[Any]) -> list[Any]:
    first, arrays = requests[0], [request.array for request in requests]
    if isinstance(first, Allreduce):
        combined = arrays[0]
        for array in arrays[1:]:
            combined = tf.maximum(combined, array) if first.op == "max" else combined + array
        return [combined] * len(requests)
    if isinstance(first, Allgather):
        return [arrays] * len(requests)
    pieces = [tf.split(request.array, request.splits) for request in requests]
    return [list(received) for received in zip(*pieces)]


EXCHANGES = {
    **{
        name: (scheme, 3, 1)
        for name, scheme in {**SCHEMES, **LITERATURE}.items()
        if scheme.host_requirement() is None
    },
    **{
        f"hierarchical-{name}": (Hierarchical(SCHEMES[name]), 4, 2)
        for name in (
            "qsgd",
            "nuqsgd-inf-alltoall",
            "global-l2",
            "exponential-max",
            "eden-alltoall",
            "binsgdm",
            "binsgdm-average",
        )
    },
    "hierarchical-natural": (Hierarchical(LITERATURE["natural"]), 4, 2),
    "one-node": (Hierarchical(SCHEMES["binsgdm"]), 2, 2),
    "inside-float16": (Hierarchical(SCHEMES["global-max"], "float16"), 4, 2),
    "inside-8": (Hierarchical(SCHEMES["eden"], 8), 4, 2),
}
"""Scheme, workers, workers of a node."""


@pytest.mark.parametrize(
    ("way", "name"),
    [
        *in_turn(["eager", "function"], [[name] for name in EXCHANGES]),
        *(extended("xla", name) for name in EXCHANGES),
    ],
    indirect=["way"],
)
def test_schemes(way: Callable, name: str) -> None:
    """Whole exchanges of workers whose counts differ, with a scheme's own numpy arrays among the tensors."""
    (scheme, size, local_size), lengths = EXCHANGES[name], (0, 33, 1025)
    workers = [Workers(rank, size, local_size=local_size) for rank in range(size)]
    scheme = scheme.for_workers(workers[0])
    groups = [[gaussian(10 * rank + count, count) for count in lengths] for rank in range(size)]
    groups[1][-1][1024] = np.inf
    states = [owned_states(scheme, own, worker) for own, worker in zip(groups, workers)]
    variables = [
        [
            BinaryState(
                FlatVariable(tf.Variable(state.momentum)), FlatVariable(tf.Variable(state.scale)), state.beta
            )
            for state in own
        ]
        for own in states
    ]

    def exchange(groups, step):
        exchanges = []
        for rank, own in enumerate(groups):
            members = [
                Gradient(values, kernels.RngKey(0, str(i)), step + rank, variables[rank][i])
                for i, values in enumerate(own)
            ]
            exchanges.append(scheme.begin(members, workers[rank], kernels))
        answers: list[Any] = [None] * size
        while True:
            try:
                requests = [one.send(answer) for one, answer in zip(exchanges, answers)]
            except StopIteration as stop:
                decoded = stop.value
                targets = [kernels.empty(count) for count in lengths]
                return [decoded.write(i, 0.5, out) for i, out in enumerate(targets)]
            answers = perform(requests, local_size)

    with np.errstate(all="ignore"):
        steps = list(range(5, 5 + size))
        expected = lockstep(scheme, groups, states, local_size=local_size, steps=steps)[0]
    actual = way(exchange)(to_tensor(groups), tf.constant(5, tf.int64))
    for i, count in enumerate(lengths):
        out = array_of(count, np.float32)
        expected.write(i, 0.5, out)
        assert_same_bits(out, actual[i].numpy(), f"gradient {i} of {name}")
        for own, other in zip(states, variables):
            assert_same_bits(own[i].momentum, other[i].momentum.values().numpy(), "momentum")
