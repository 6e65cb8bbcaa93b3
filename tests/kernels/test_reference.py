"""The numpy kernels against scalar models on Python's integers and fractions, which know nothing of arrays."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers import LENGTHS, assert_unbiased, examples, gaussian, keys, same_bits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from horovod_quant.kernels import reference
from horovod_quant.kernels.keys import Key, hash32
from horovod_quant.kernels.layout import TILE, code_words, sum_words

KEY = Key(0x12345678, 0x9ABCDEF0)
FLOAT_TYPES = (np.float16, np.float32, np.float64, np.uint16)

floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
any_floats32 = st.floats(width=32)
tame = st.one_of(
    st.floats(-1, 1, width=32), st.just(0.0), st.just(-0.0), st.sampled_from([2.0**-k for k in range(150)])
)


def rounded32(value: Fraction) -> Fraction:
    """The nearest float32, to even; inf does not occur here."""
    if not value:
        return Fraction(0)
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - 23, -149)
    return round(value / unit) * unit  # Python rounds halves to even


def arrays(elements: Any, low: int = 0, high: int = 130) -> Any:
    return hnp.arrays(np.float32, st.integers(low, high), elements=elements)


def random_bits(i: int, key: Key, bits: int) -> int:
    return int(hash32(i, 1, key)[0]) >> (32 - bits)


# ---- conversions


halves = st.integers(0, 0xFFFF).map(lambda high: float(np.uint32(high << 16 | 0x8000).view(np.float32)))


@given(x=arrays(st.one_of(any_floats32, halves)))
def test_bfloat16_is_rounded_to_nearest_even(x: np.ndarray) -> None:
    out = np.empty(len(x), np.uint16)
    reference.store_float32(x, out)
    back = reference.as_float32(out)
    for value, stored in zip(x, back):
        if not np.isfinite(value):
            assert np.isnan(stored) if np.isnan(value) else stored == value
            continue
        bits = int(np.abs(value).view(np.uint32))
        low, high = bits >> 16 << 16, (bits >> 16) + 1 << 16
        nearest = (
            low if bits - low < high - bits or (bits - low == high - bits and not bits >> 16 & 1) else high
        )
        assert abs(stored).view(np.uint32) == nearest
        assert np.signbit(stored) == np.signbit(value)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_every_16_bit_pattern_survives_the_conversion_to_float32(dtype: type) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    x = patterns if dtype is np.uint16 else patterns.view(np.float16).astype(dtype)
    back = reference.store_float32(reference.as_float32(x), np.empty_like(x))
    nan = np.isnan(reference.as_float32(x))
    assert np.array_equal(np.isnan(reference.as_float32(back)), nan)
    assert np.array_equal(back[~nan], x[~nan])


def test_conversions_beyond_a_types_range_give_infinities_without_a_warning(recwarn) -> None:
    assert reference.as_float32(np.array([1e300, -1e300])).tolist() == [np.inf, -np.inf]
    out = reference.store_float32(np.array([1e38, -1e38], np.float32), np.empty(2, np.float16))
    assert out.tolist() == [np.inf, -np.inf]
    assert not recwarn.list


# ---- norms


@given(x=arrays(any_floats32), bucket_size=st.sampled_from([32, 64, 96]))
def test_bucket_maxima_are_the_largest_magnitudes_or_infinity(x: np.ndarray, bucket_size: int) -> None:
    got = reference.bucket_maxima(x, bucket_size)
    expected = []
    for start in range(0, len(x), bucket_size):
        bucket = x[start : start + bucket_size]
        expected.append(max(abs(float(v)) for v in bucket) if np.isfinite(bucket).all() else np.inf)
    assert got.dtype == np.float32
    assert got.tolist() == expected


@given(x=arrays(any_floats32), bucket_size=st.sampled_from([32, 64, 96]))
def test_bucket_square_sums_are_lanes_then_a_tree_then_24_bits(x: np.ndarray, bucket_size: int) -> None:
    got = reference.bucket_square_sums(x, bucket_size)
    expected = []
    for start in range(0, len(x), bucket_size):
        bucket = [float(v) for v in x[start : start + bucket_size]]
        lanes = [0.0] * 32
        for i, value in enumerate(bucket):
            lanes[i % 32] += value * value
        for half in (16, 8, 4, 2, 1):
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        total = lanes[0]
        if total and math.isfinite(total):
            mantissa, exponent = math.frexp(total)
            total = math.ldexp(math.floor(mantissa * 2**24 + 0.5), exponent - 24)
        expected.append(total if math.isfinite(total) else np.inf)
    assert got.dtype == np.float64
    assert got.tolist() == expected


def test_square_sums_add_up_exactly_in_every_order() -> None:
    # Norms within a factor of thousands, as the docstring promises.
    scales = np.float32([1, 3e-3, 7, 1e3, 0.1])
    sums = [reference.bucket_square_sums(scale * gaussian(i, 4096), 1024) for i, scale in enumerate(scales)]
    totals = {
        tuple(np.add.reduce([sums[i] for i in np.random.default_rng(s).permutation(5)])) for s in range(40)
    }
    assert len(totals) == 1
    assert list(totals.pop()) == [float(sum(Fraction(float(s[j])) for s in sums)) for j in range(4)]


@pytest.mark.parametrize("norms", [reference.bucket_maxima, reference.bucket_square_sums])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_non_finite_element_makes_its_buckets_norm_infinite_and_no_other(norms: Any, bad: float) -> None:
    x = gaussian(0, 200)
    clean = norms(x, 64)
    x[70] = bad
    got = norms(x, 64)
    assert got[1] == np.inf
    assert np.array_equal(got[[0, 2, 3]], clean[[0, 2, 3]])


def test_norms_leave_nothing_finite_out_of_range() -> None:
    huge = np.float32([3e38, 3e38])
    assert reference.norms_of_square_sums(reference.bucket_square_sums(huge[:1], 32)) == np.float32(3e38)
    assert reference.norms_of_square_sums(reference.bucket_square_sums(huge, 32)) == np.inf
    assert reference.bucket_maxima(huge, 32) == np.float32(3e38)


def test_unusable_norms_quantize_to_zero_and_infinite_ones_decode_to_nan() -> None:
    norms = np.float32([0, 1e-40, 2.0**-97, 2.0**-96, 1, 3e38, np.inf, np.nan])
    inverse = reference.inverse_norms(norms, 127 << 24)
    assert np.array_equal(inverse > 0, [False] * 3 + [True] * 3 + [False] * 2)
    assert np.isfinite(inverse).all()
    scales = reference.decoding_scales(norms, 127, 0.5)
    assert np.array_equal(np.isnan(scales), [False] * 6 + [True] * 2)


# ---- sums and statistics


def sum_in_a_tree(values: list[float]) -> float:
    while len(values) > 1:
        half = (len(values) + 1) // 2
        values = [a + b for a, b in zip(values, [*values[half:], 0.0])][:half]
    return values[0] if values else 0.0


def in_24_bits(value: float) -> float:
    if not math.isfinite(value):
        return math.inf
    mantissa, exponent = math.frexp(abs(value))
    return math.copysign(math.ldexp(math.floor(mantissa * 2**24 + 0.5), exponent - 24), value)


def sum_of(values: list[float]) -> float:
    """Of a bucket: 32 lanes, a tree over them, 24 bits."""
    lanes = [0.0] * 32
    for i, value in enumerate(values):
        lanes[i % 32] += value
    for half in (16, 8, 4, 2, 1):
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return in_24_bits(lanes[0])


@given(x=arrays(any_floats32), bucket_size=st.sampled_from([32, 64, 96]))
def test_bucket_sums_are_lanes_then_a_tree_then_24_bits(x: np.ndarray, bucket_size: int) -> None:
    starts = range(0, len(x), bucket_size)
    for kernel, term in ((reference.bucket_sums, float), (reference.bucket_magnitude_sums, abs)):
        got = kernel(x, bucket_size)
        assert got.dtype == np.float64
        assert got.tolist() == [sum_of([term(float(v)) for v in x[at : at + bucket_size]]) for at in starts]
        assert not np.any(np.signbit(got) & (got == 0))


def test_sums_that_cancel_and_sums_below_zero() -> None:
    x = np.zeros(96, np.float32)
    x[:3], x[32:34], x[64] = (1, -1, -0.0), (-1, -(2.0**-23)), -np.inf
    assert reference.bucket_sums(x, 32).tolist() == [0.0, -(1 + 2.0**-23), np.inf]
    x[33] = -(2.0**-24)  # a half of the last bit: away from zero
    assert reference.bucket_sums(x, 32)[1] == -(1 + 2.0**-23)


def tile_sums(x: np.ndarray, power: int) -> list[float]:
    return [sum_of([float(v) ** power for v in x[at : at + TILE]]) for at in range(0, len(x), TILE)]


@pytest.mark.parametrize("count", [1, 31, 1024, 1025, 5000])
def test_statistics_of_a_tensor(count: int) -> None:
    x = (gaussian(count, count) + np.float32(0.3)) * np.float32(1e-20)
    inverse = in_24_bits(1 / count)
    mean_magnitude = in_24_bits(sum_in_a_tree(tile_sums(np.abs(x), 1))) * inverse
    mean = in_24_bits(in_24_bits(sum_in_a_tree(tile_sums(x, 1))) * inverse)
    variance = in_24_bits(sum_in_a_tree(tile_sums(x, 2))) * inverse - mean * mean
    expected = [
        np.abs(x).max(),
        np.float32(mean_magnitude),
        np.float32(math.sqrt(max(variance, 0.0))),
    ]
    kernels = (reference.tensor_maximum, reference.tensor_mean_magnitude, reference.tensor_deviation)
    for kernel, value in zip(kernels, expected):
        assert same_bits(kernel(x), np.array([value], np.float32)), kernel.__name__
    wide = x.astype(np.float64)
    assert reference.tensor_mean_magnitude(x)[0] == pytest.approx(np.abs(wide).mean(), rel=2.0**-21)
    assert abs(reference.tensor_deviation(x)[0] - wide.std()) < 2.0**-10 * np.sqrt(np.mean(wide**2))


@pytest.mark.parametrize(
    "kernel", [reference.tensor_maximum, reference.tensor_mean_magnitude, reference.tensor_deviation]
)
def test_statistics_of_nothing_of_zeros_and_of_what_is_not_finite(kernel: Any) -> None:
    zero = np.zeros(1, np.float32)
    for x in (np.zeros(0, np.float32), np.zeros(5, np.float16), np.full(2000, -0.0, np.float32)):
        assert same_bits(kernel(x), zero)
        assert not np.signbit(kernel(x)[0])
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones(3000)
        x[2500] = bad
        assert kernel(x).tolist() == [np.inf]
    assert kernel(np.array([1e300, -1e300])).tolist() == [np.inf]


def test_elements_that_are_equal_hardly_deviate() -> None:
    for value in (0.3, -1e-30, 3e38):
        assert reference.tensor_deviation(np.full(5000, value, np.float32))[0] < 2.0**-10 * abs(value)


# ---- arithmetic of schemes' own


@given(pairs=st.lists(st.tuples(any_floats32, any_floats32)))
def test_comparisons_choices_and_minima(pairs: list[tuple[float, float]]) -> None:
    a, b = (np.array([pair[i] for pair in pairs], np.float32) for i in (0, 1))
    flags = reference.less(a, b)
    assert flags.tolist() == [x < y for x, y in zip(a.tolist(), b.tolist())]
    chosen = reference.where(flags, a, b)
    least = reference.minimum(a, b)
    assert chosen.dtype == least.dtype == np.float32
    for i in range(len(a)):
        # view: 0 and -0 differ, and a NaN is the one that was given
        assert chosen[i].view(np.int32) == (a if a[i] < b[i] else b)[i].view(np.int32)
        assert least[i].view(np.int32) == (b if b[i] < a[i] else a)[i].view(np.int32)


def test_an_operand_is_a_number_or_an_array_of_one_or_of_as_many() -> None:
    x = np.array([-1, 2, np.nan], np.float16)
    one = np.array([1.5], np.float32)
    assert reference.less(x, 0).tolist() == reference.less(x, np.zeros(1)).tolist() == [True, False, False]
    assert reference.minimum(x, one)[:2].tolist() == reference.minimum(x, 1.5)[:2].tolist() == [-1, 1.5]
    assert np.isnan(reference.minimum(x, one)[2])
    flags = np.array([True, False])
    assert reference.where(flags, one, -one).tolist() == [1.5, -1.5]
    assert reference.where(flags, 1e300, np.array([1, 2], np.float64)).tolist() == [np.inf, 2]
    assert reference.where(flags[:0], one, 0.0).tolist() == []
    for kernel in (reference.less, reference.minimum):
        with pytest.raises(ValueError, match="an array of 2 elements beside one of 3"):
            kernel(x, np.ones(2, np.float32))
    with pytest.raises(ValueError, match="an array of 3 elements beside one of 2"):
        reference.where(flags, x, 0.0)


@given(x=arrays(any_floats32))
def test_next_powers_of_two(x: np.ndarray) -> None:
    for value, power in zip(np.abs(x).tolist(), reference.next_powers_of_two(x).tolist()):
        if value == 0 or not value <= 2.0**127:
            assert power == (0 if value == 0 else np.inf)
        else:
            assert math.frexp(power)[0] == 0.5
            assert power >= value
            assert power / 2 < value or power == 2.0**-126


# ---- uniform levels


def uniform_model(x: float, norm: float, levels: int, i: int, key: Key) -> int:
    """round_uniform for one element: floor(y + random) with every float32 operation rounded exactly once."""
    k = min(24, 31 - levels.bit_length())
    limit = levels << k
    if not 2.0**-96 <= norm < math.inf:
        return 0
    inverse = rounded32(Fraction(limit) / Fraction(norm))
    y = rounded32(Fraction(x) * inverse)
    y = max(-limit, min(limit, y))
    return (int(y) + random_bits(i, key, k)) >> k


level_numbers = st.one_of(
    st.integers(1, 32767), st.sampled_from([1, 2, 3, 127, 128, 255, 256, 16383, 16384, 32767])
)


@given(x=arrays(tame, 1, 40), scale=st.floats(2.0**-120, 1.5, width=32), levels=level_numbers, key=keys)
def test_uniform_rounding_is_the_integer_model(x: np.ndarray, scale: float, levels: int, key: Key) -> None:
    norms = reference.bucket_maxima(x, 32) * np.float32(scale)  # a scale below 1: elements beyond the norm
    got = reference.round_uniform(x, norms, 32, levels, key, 64)
    assert got.dtype == np.int32
    model = [uniform_model(float(v), float(norms[i // 32]), levels, 64 + i, key) for i, v in enumerate(x)]
    assert got.tolist() == model


@given(x=arrays(any_floats32, 1, 40), norm=any_floats32, levels=level_numbers, key=keys)
def test_uniform_rounding_never_leaves_its_levels(x: np.ndarray, norm: float, levels: int, key: Key) -> None:
    norms = np.full(2, abs(norm), np.float32)
    assert np.abs(reference.round_uniform(x, norms, 32, levels, key)).max() <= levels


@pytest.mark.parametrize("levels", [1, 7, 127, 128, 255, 1000, 16383, 32767])
def test_random_bits_are_as_many_as_int32_has_room_for(levels: int) -> None:
    k = reference.fraction_bits(levels)
    assert (levels + 1 << k) - 1 < 2**31
    assert k == 24 or levels + 1 << k + 1 > 2**31
    for extreme in (0, 0xFFFFFFFF):
        with mock.patch.object(
            reference, "hash32", lambda start, n, key, h=extreme: np.full(n, h, np.uint32)
        ):
            x = np.float32([1, -1, 0.5])
            digits = reference.round_uniform(x, np.float32([1]), 32, levels, KEY)
        assert digits[:2].tolist() == [levels, -levels]
        assert digits[2] == (math.ceil(levels / 2) if extreme else levels // 2)


@pytest.mark.parametrize("levels", [1, 7, 127, 128, 1000, 32767])
def test_uniform_rounding_is_unbiased(levels: int) -> None:
    x = np.concatenate([gaussian(levels, 60), np.float32([1e-4, -1e-4, 0.5, -1])])
    norm = reference.bucket_maxima(x, 64)
    samples = np.tile(x, 4000)
    digits = reference.round_uniform(samples, np.repeat(norm, 4000), 64, levels, KEY).reshape(-1, 64)
    expected = x.astype(np.float64) / float(norm[0]) * levels
    # Two roundings of float32, relative, and the bits below the 2^k that are cut off.
    slack = levels * 2.0**-23 + 2.0 ** -reference.fraction_bits(levels)
    assert_unbiased(digits, expected, 1.0, slack)
    assert np.array_equal(
        digits[:, expected == np.round(expected)][0], expected[expected == np.round(expected)]
    )


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_other_types_are_quantized_and_decoded_as_if_by_float32(dtype: type) -> None:
    x32 = gaussian(1, 1000)
    x = reference.store_float32(x32, np.empty(1000, dtype))
    x32 = reference.as_float32(x)
    norms = reference.bucket_maxima(x, 96)
    assert same_bits(norms, reference.bucket_maxima(x32, 96))
    squares = reference.bucket_square_sums(x, 96)
    assert same_bits(squares, reference.bucket_square_sums(x32, 96))
    for encode, decode, extra in (
        (reference.encode_uniform_sum, reference.decode_uniform_sum, (7, 5)),
        (reference.encode_uniform_codes, reference.decode_uniform_codes, (4,)),
        (reference.encode_exponential, reference.decode_exponential, (4,)),
    ):
        words = encode(x, norms, 96, *extra, KEY)
        assert same_bits(words, encode(x32, norms, 96, *extra, KEY))
        inputs = (words, norms) if encode is reference.encode_uniform_sum else ([words], [norms])
        expected = np.empty(1000, np.float32)
        decode(*inputs, 96, *extra, 0.3, expected)
        out = np.empty(1000, dtype)
        decode(*inputs, 96, *extra, 0.3, out)
        assert same_bits(out, reference.store_float32(expected, np.empty(1000, dtype)))
    states = [np.zeros(1000, np.float32) for _ in range(4)]
    bits, _ = reference.binarize(x, states[0], states[1], 0.9, KEY)
    assert same_bits(bits, reference.binarize(x32, states[2], states[3], 0.9, KEY)[0])
    assert same_bits(states[0], states[2])
    assert same_bits(
        reference.decode_signs(bits, 0.3, np.empty(1000, dtype)),
        reference.store_float32(
            reference.decode_signs(bits, 0.3, np.empty(1000, np.float32)), np.empty(1000, dtype)
        ),
    )


# ---- exponential levels


def exponential_model(x: float, norm: float, bits: int, i: int, key: Key) -> int:
    top = 2 ** (bits - 1) - 1
    if not 2.0**-96 <= norm < math.inf:
        return 0
    r = rounded32(Fraction(x) * rounded32(1 / Fraction(norm)))
    sign, r = (-1 if r < 0 else 1), min(abs(r), Fraction(1))
    if sign < 0:
        key = key._replace(flip=key.flip ^ key.mirror)
    smallest = Fraction(2) ** (1 - top)
    if top == 127 and r < smallest:  # one level is 2^23 subnormal floats
        return sign * (int(r / smallest * 2**23) + random_bits(i, key, 23) >> 23)
    if r < smallest:
        return sign * (int(r / smallest * 2**24) + random_bits(i, key, 24) >> 24)
    exponent = 0
    while Fraction(2) ** exponent > r:
        exponent -= 1
    fraction = r / Fraction(2) ** exponent - 1
    return sign * (exponent + top + (int(fraction * 2**23) + random_bits(i, key, 23) >> 23))


@given(x=arrays(tame, 1, 40), scale=st.floats(2.0**-120, 1.5, width=32), bits=st.integers(2, 8), key=keys)
def test_exponential_rounding_is_the_integer_model(x: np.ndarray, scale: float, bits: int, key: Key) -> None:
    norms = reference.bucket_maxima(x, 32) * np.float32(scale)
    got = reference.round_exponential(x, norms, 32, bits, key, 64)
    assert got.dtype == np.int32
    model = [exponential_model(float(v), float(norms[i // 32]), bits, 64 + i, key) for i, v in enumerate(x)]
    assert got.tolist() == model


@given(x=arrays(any_floats32, 1, 40), norm=any_floats32, bits=st.integers(2, 8), key=keys)
def test_exponential_rounding_never_leaves_its_levels(
    x: np.ndarray, norm: float, bits: int, key: Key
) -> None:
    digits = reference.round_exponential(x, np.full(2, abs(norm), np.float32), 32, bits, key)
    assert np.abs(digits).max() <= 2 ** (bits - 1) - 1


@pytest.mark.parametrize("bits", range(2, 9))
def test_exponential_rounding_is_unbiased(bits: int) -> None:
    x = np.concatenate([gaussian(bits, 56), np.float32([1, -1, 0.75, 1e-3, -1e-4, 2.0**-6, 2.0**-7, 0])])
    norm = reference.bucket_maxima(x, 64)
    samples = np.tile(x, 4000)
    digits = reference.round_exponential(samples, np.repeat(norm, 4000), 64, bits, KEY)
    values = reference.exponential_values(digits, bits).reshape(-1, 64)
    assert_unbiased(values, x.astype(np.float64) / float(norm[0]), 0.5, 2.0**-23)


@pytest.mark.parametrize("bits", range(2, 9))
def test_exponential_levels_are_powers_of_two_down_from_one(bits: int) -> None:
    top = 2 ** (bits - 1) - 1
    digits = np.arange(-top, top + 1, dtype=np.int32)
    expected = [0.0 if d == 0 else math.copysign(2.0 ** (abs(d) - top), d) for d in digits.tolist()]
    assert reference.exponential_values(digits, bits).tolist() == expected
    # A level is rounded to itself whatever is drawn.
    x = np.tile(reference.exponential_values(digits, bits), 20)
    norms = np.ones(-(-len(x) // 32), np.float32)
    assert reference.round_exponential(x, norms, 32, bits, KEY).tolist() == np.tile(digits, 20).tolist()


def unit_value(digit: int) -> Fraction:
    return Fraction(0) if digit == 0 else Fraction(2) ** (abs(digit) - 1) * (1 if digit > 0 else -1)


@pytest.mark.parametrize("a", range(-4, 5))
@pytest.mark.parametrize("b", range(-4, 5))
def test_pairwise_addition_draws_neighbouring_levels_with_the_mean_of_the_sum(a: int, b: int) -> None:
    # The fraction of outcomes over 2^16 draws: the Bernstein bound of helpers.py, 3 comparisons for each of 81 pairs.
    count = 1 << 16
    digits = reference.add_exponential(np.full(count, a, np.int32), np.full(count, b, np.int32), KEY)
    assert digits.dtype == np.int32
    outcomes = sorted({unit_value(d) for d in np.unique(digits).tolist()})
    exact = unit_value(a) + unit_value(b)
    assert outcomes[0] <= exact <= outcomes[-1]
    assert len(outcomes) == (1 if exact in map(unit_value, range(-6, 7)) else 2)
    values = np.array([float(unit_value(d)) for d in range(-5, 6)])[digits + 5]
    assert_unbiased(values[:, None], np.array([float(exact)]), 16.0)


@given(
    a=hnp.arrays(np.int32, 50, elements=st.integers(-1100, 1100)),
    b=hnp.arrays(np.int32, 50, elements=st.integers(-1100, 1100)),
    key=keys,
)
def test_pairwise_addition_is_the_integer_model(a: np.ndarray, b: np.ndarray, key: Key) -> None:
    got = reference.add_exponential(a, b, key)
    for i, (p, q) in enumerate(zip(a.tolist(), b.tolist())):
        large, small = (q, p) if abs(q) > abs(p) else (p, q)
        gap, sign = abs(large) - abs(small), (-1 if large < 0 else 1)
        draw = random_bits(i, key, 32)
        if small == 0:
            expected = large
        elif (large < 0) == (small < 0):
            expected = sign * (abs(large) + (draw < 1 << 32 >> gap))
        else:
            expected = 0 if gap == 0 else sign * (abs(large) - (draw < 1 << 33 >> gap))
        assert got[i] == expected
    assert np.array_equal(got, reference.add_exponential(b, a, key))


# ---- one bit


@examples(40)
@given(
    gradient=hnp.arrays(np.float32, 40, elements=st.floats(-100, 100, width=32)),
    momentum=hnp.arrays(np.float32, 40, elements=st.floats(-1, 1, width=32)),
    room=hnp.arrays(np.float32, 40, elements=st.one_of(st.floats(0, 1, width=32), st.just(0.0))),
    beta=st.sampled_from([0.0, 0.5, 0.9, 0.95, 0.999]),
    key=keys,
)
def test_binarization_is_the_scalar_model(gradient, momentum, room, beta: float, key: Key) -> None:
    scale = np.abs(momentum) + room
    keep, take = Fraction(float(np.float32(beta))), Fraction(float(np.float32(1 - beta)))
    expected = []
    for i in range(40):
        g, m, b = (Fraction(float(a[i])) for a in (gradient, momentum, scale))
        m = rounded32(rounded32(keep * m) + rounded32(take * g))
        b = rounded32(rounded32(keep * b) + rounded32(take * abs(g)))
        width = b if b >= Fraction(2) ** -126 else 1
        signed = random_bits(i + 1024, key, 32)
        draw = Fraction((signed - (1 << 32) * (signed >> 31)) >> 8, 1 << 23)
        expected.append((float(m), float(b), int(rounded32(draw * width) < m)))
    words, broken = reference.binarize(gradient, momentum, scale, beta, key, 1024)
    bits = reference.unpack_codes(words, 1, 40)
    assert list(zip(momentum.tolist(), scale.tolist(), bits.tolist())) == expected
    assert broken.tolist() == [False]
    assert len(words) == 32  # whole tiles


def test_signs_follow_momentum_over_scale() -> None:
    u = np.linspace(-1, 1, 64).astype(np.float32)
    momentum = np.tile(u, 4096)
    scale = np.ones_like(momentum)
    words, _ = reference.binarize(np.zeros_like(momentum), momentum, scale, 0.5, KEY)  # halves both
    signs = reference.decode_signs(words, 1.0, np.empty(len(momentum), np.float32)).reshape(-1, 64)
    assert_unbiased(signs, u.astype(np.float64), 2.0, 2.0**-22)
    assert set(signs[:, 0]) == {-1.0}
    assert set(signs[:, -1]) == {1.0}


def test_elements_that_never_had_a_gradient_toss_a_coin() -> None:
    zeros = [np.zeros(1 << 16, np.float32) for _ in range(3)]
    words, _ = reference.binarize(*zeros, 0.9, KEY)
    signs = reference.decode_signs(words, 1.0, np.empty(1 << 16, np.float32))
    assert_unbiased(signs[:, None], np.zeros(1), 2.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_tile_with_a_non_finite_gradient_is_reported_and_leaves_the_state(bad: float) -> None:
    gradient, momentum, scale = gaussian(0, 2500), gaussian(1, 2500), 10 + np.abs(gaussian(2, 2500))
    clean = [momentum.copy(), scale.copy()]
    reference.binarize(gradient, *clean, 0.9, KEY)
    before = [momentum.copy(), scale.copy()]
    gradient[1024 + 500] = bad
    _, broken = reference.binarize(gradient, momentum, scale, 0.9, KEY)
    assert broken.tolist() == [False, True, False]
    for got, old, updated in zip((momentum, scale), before, clean):
        assert np.array_equal(got[1024:2048], old[1024:2048])
        assert np.array_equal(got[:1024], updated[:1024])
        assert np.array_equal(got[2048:], updated[2048:])


def sign_words(bits: np.ndarray) -> np.ndarray:
    return reference.pack_codes(bits.astype(np.uint32), 1, whole_tiles=True)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 255, 256, 1000])
def test_vote_is_the_integer_model(size: int) -> None:
    bits = np.random.default_rng(size).random((size, 2 * TILE)) < np.linspace(0, 1, 2 * TILE)
    bits[:, :2] = [[False, True]] * size
    got = reference.unpack_codes(reference.vote([sign_words(b) for b in bits], KEY, TILE), 1, 2 * TILE)
    k = min(24, 32 - size.bit_length())
    draws = hash32(TILE, 2 * TILE, KEY) >> np.uint32(32 - k)
    expected = [int(int(r) * size < int(c) << k) for r, c in zip(draws, bits.sum(axis=0))]
    assert got.tolist() == expected
    assert got[:2].tolist() == [0, 1]  # unanimous votes are kept


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_vote_has_the_mean_of_the_signs(size: int) -> None:
    ones = np.arange(TILE) % (size + 1)
    words = [np.tile(sign_words(ones > worker), 1024) for worker in range(size)]
    signs = reference.decode_signs(reference.vote(words, KEY), 1.0, np.empty(1024 * TILE, np.float32))
    assert_unbiased(signs.reshape(-1, TILE), 2 * ones / size - 1, 2.0, 2.0**-22)


# ---- packing


@pytest.mark.parametrize("width", range(2, 17))
def test_sum_words_are_polynomials_in_two_to_the_width(width: int) -> None:
    largest = 2 ** (width - 1) - 1
    digits = np.random.default_rng(width).integers(-largest, largest, 5 * TILE - 7, endpoint=True)
    words = reference.pack_sum(digits.astype(np.int32), width)
    fields = 32 // width
    assert words.dtype == np.int32
    assert len(words) == sum_words(len(digits), width)
    for at, word in enumerate(words.tolist()):
        t, g = divmod(at, 32)
        elements = [32 * (fields * t + i) + g for i in range(fields)]
        value = sum(int(digits[e]) << width * i for i, e in enumerate(elements) if e < len(digits))
        assert (word - value) % 2**32 == 0


@pytest.mark.parametrize("bits", range(1, 17))
def test_code_words_are_dense_streams_of_bits_in_32_lanes(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, 2 * TILE + 100).astype(np.uint32)
    words = reference.pack_codes(codes, bits)
    assert words.dtype == np.int32
    assert len(words) == code_words(len(codes), bits)
    for lane in range(32):
        stream = sum(code << bits * row for row, code in enumerate(codes[lane::32].tolist()))
        lane_words = words[lane::32].view(np.uint32).tolist()
        assert lane_words == [stream >> 32 * t & 0xFFFFFFFF for t in range(len(lane_words))]
        assert stream >> 32 * len(lane_words) == 0


def test_tiny_cases_are_the_hand_computed_words() -> None:
    # Width 16: two fields. Element 0 in the low half of word 0, element 32 in its high half; -1 borrows from it.
    digits = np.zeros(64, np.int32)
    digits[[0, 32, 33]] = -1, 2, -3
    words = reference.pack_sum(digits, 16)
    assert words[:2].tolist() == [(2 << 16) - 1, -3 << 16]
    assert not words[2:].any()
    # Width 5, six fields: 1 + 2 * 2^5 - 15 * 2^25, rows 0, 1 and 5 of lane 31.
    digits = np.zeros(192, np.int32)
    digits[[31, 63, 191]] = 1, 2, -15
    assert reference.pack_sum(digits, 5)[31] == 1 + 64 - 15 * 2**25
    # Three bits: rows 0, 1, 10 of lane 2 at bits 0, 3, 30; row 10 straddles into the second word.
    codes = np.zeros(352, np.uint32)
    codes[[2, 34, 322]] = 5, 3, 6
    words = reference.pack_codes(codes, 3)
    assert words[[2, 34]].view(np.uint32).tolist() == [5 | 3 << 3 | (6 << 30) % 2**32, 6 >> 2]
    # Sign and magnitude: -2 with 4 bits is 1010.
    assert reference.codes_of_digits(np.int32([-2, 2, 0, -7]), 4).tolist() == [0b1010, 0b0010, 0, 0b1111]


@pytest.mark.parametrize("elements", LENGTHS)
def test_packings_invert_at_every_width(elements: int) -> None:
    rng = np.random.default_rng(elements)
    for width in range(2, 17):
        largest = 2 ** (width - 1) - 1
        digits = rng.integers(-largest, largest, elements, endpoint=True).astype(np.int32)
        words = reference.pack_sum(digits, width)
        assert len(words) == sum_words(elements, width)
        assert same_bits(reference.unpack_sum(words, width, elements), digits)
        codes = reference.codes_of_digits(digits, width)
        assert same_bits(reference.digits_of_codes(codes, width), digits)
    for bits in range(1, 17):
        codes = rng.integers(0, 2**bits, elements).astype(np.uint32)
        for whole_tiles in (False, True):
            words = reference.pack_codes(codes, bits, whole_tiles=whole_tiles)
            assert len(words) == code_words(-(-elements // TILE) * TILE if whole_tiles else elements, bits)
            assert same_bits(reference.unpack_codes(words, bits, elements), codes)


def test_packings_invert_for_ten_million_elements() -> None:
    elements = 10**7
    digits = np.random.default_rng(0).integers(-15, 16, elements).astype(np.int32)
    assert same_bits(reference.unpack_sum(reference.pack_sum(digits, 5), 5, elements), digits)
    codes = reference.codes_of_digits(digits, 5)
    assert same_bits(reference.unpack_codes(reference.pack_codes(codes, 5), 5, elements), codes)


@examples(30)
@pytest.mark.parametrize("width", range(2, 17))
@given(data=st.data())
def test_sums_of_words_are_sums_of_digits_up_to_the_limit(width: int, data: st.DataObject) -> None:
    limit = 2 ** (width - 1) - 1
    digits = hnp.arrays(np.int32, 70, elements=st.integers(-limit, limit))
    target, *parts = data.draw(st.lists(digits, min_size=1, max_size=8))
    parts.append(
        target - np.sum(parts, axis=0, dtype=np.int32)
    )  # any digits at all, their sum within the limit
    words = np.add.reduce([reference.pack_sum(part, width) for part in parts], dtype=np.int32)
    assert same_bits(reference.unpack_sum(words, width, 70), target)


@pytest.mark.parametrize("width", range(2, 17))
def test_extreme_sums_stay_in_their_fields(width: int) -> None:
    limit = 2 ** (width - 1) - 1
    rows = np.arange(33 * 32) // 32
    for size in (1, 2, 3, 5, 8, 1000):
        for signs in (rows * 0 + 1, rows * 0 - 1, rows % 2 * 2 - 1, rows % 3 - 1):
            # All but one worker send s, the last one what brings the sum to the very limit.
            s = limit // size
            words = (size - 1) * reference.pack_sum((s * signs).astype(np.int32), width).astype(np.int64)
            words += reference.pack_sum(((limit - (size - 1) * s) * signs).astype(np.int32), width)
            total = reference.unpack_sum(words.astype(np.int32), width, len(signs))
            assert np.array_equal(total, limit * signs)


def test_wrong_numbers_of_words_are_refused() -> None:
    words = np.zeros(64, np.int32)
    with pytest.raises(ValueError, match="64 words cannot hold 32 digits of 8 bits"):
        reference.unpack_sum(words, 8, 32)
    with pytest.raises(ValueError, match="64 words cannot hold 1025 codes of 2 bits"):
        reference.unpack_codes(words, 2, 1025)


@pytest.mark.parametrize("elements", LENGTHS)
def test_results_are_the_same_in_a_given_buffer(elements: int) -> None:
    x, norms = gaussian(3, elements), reference.bucket_maxima(gaussian(3, elements), 96)

    def check(expected: np.ndarray, call: Any) -> None:
        buffer = np.full(len(expected) + 2, 77, expected.dtype)
        assert same_bits(call(buffer[1:-1]), expected)
        assert same_bits(buffer[1:-1], expected)
        assert buffer[0] == buffer[-1] == 77

    check(norms, lambda out: reference.bucket_maxima(x, 96, out))
    check(reference.bucket_square_sums(x, 96), lambda out: reference.bucket_square_sums(x, 96, out))
    for encode, extra in (
        (reference.encode_uniform_sum, (7, 5)),
        (reference.encode_uniform_codes, (5,)),
        (reference.encode_exponential, (5,)),
    ):
        expected = encode(x, norms, 96, *extra, KEY)
        assert len(expected) == (sum_words(elements, 5) if extra == (7, 5) else code_words(elements, 5))
        check(expected, lambda out, e=encode, a=extra: e(x, norms, 96, *a, KEY, 0, out))


def test_parts_of_a_tensor_get_the_bits_of_the_whole() -> None:
    x = gaussian(4, 5000)
    norms = reference.bucket_maxima(x, 96)
    cut = 96 * 20
    for round_, level in ((reference.round_uniform, 7), (reference.round_exponential, 4)):
        whole = round_(x, norms, 96, level, KEY)
        parts = [
            round_(x[:cut], norms[:20], 96, level, KEY),
            round_(x[cut:], norms[20:], 96, level, KEY, cut),
        ]
        assert same_bits(np.concatenate(parts), whole)


def test_workers_are_added_in_rank_order_each_with_its_norms() -> None:
    xs = [gaussian(5, 300), 1000 * gaussian(6, 300), 0.01 * gaussian(7, 300)]
    norms = [reference.bucket_maxima(x, 96) for x in xs]
    keys_ = [Key(rank, rank) for rank in range(3)]
    for encode, decode, values, levels in (
        (reference.encode_uniform_codes, reference.decode_uniform_codes, lambda d: d.astype(np.float32), 7),
        (
            reference.encode_exponential,
            reference.decode_exponential,
            lambda d: reference.exponential_values(d, 4),
            1,
        ),
    ):
        words = [encode(x, n, 96, 4, k) for x, n, k in zip(xs, norms, keys_)]
        total = None
        for w, n in zip(words, norms):
            digits = reference.digits_of_codes(reference.unpack_codes(w, 4, 300), 4)
            scale = np.repeat(n / np.float32(levels) * np.float32(0.25), 96)[:300]
            total = values(digits) * scale if total is None else total + values(digits) * scale
        assert same_bits(decode(words, norms, 96, 4, 0.25, np.empty(300, np.float32)), total)
