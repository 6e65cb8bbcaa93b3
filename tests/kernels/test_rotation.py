"""EDEN's kernels: against models, and by what they promise for every distribution."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from helpers import UNLIKE_BUCKETS, assert_mean, assert_unbiased, gaussian, heavy_tailed, part, same_bits

from horovod_quant.codecs.rotated_codes import eden_variance_factor
from horovod_quant.kernels import native, reference, rotation
from horovod_quant.kernels.keys import Key, RngKey, hash32
from horovod_quant.kernels.layout import TILE, code_words

KEY = Key(0x12345678, 0x9ABCDEF0)
every_width = pytest.mark.parametrize("bits", [1, 2, 3, 4])
with_and_without_trellis = pytest.mark.parametrize("trellis", [False, True])


def decoded(x: np.ndarray, bits: int, trellis: bool, key: Key = KEY) -> np.ndarray:
    words, scales = rotation.encode_rotated(x, bits, key, trellis=trellis)
    return rotation.decode_rotated(words, scales, bits, key, 1.0, np.empty(len(x), x.dtype), trellis=trellis)


# ---- tables


@every_width
def test_levels_are_those_of_lloyds_iteration(bits: int) -> None:
    normal = NormalDist()

    def density(t: float) -> float:
        return 0.0 if math.isinf(t) else normal.pdf(t)

    levels = list(rotation.LEVELS[bits])
    for _ in range(3000):
        edges = [0.0, *((a + b) / 2 for a, b in zip(levels, levels[1:])), math.inf]
        masses = [normal.cdf(high) - normal.cdf(low) for low, high in zip(edges, edges[1:])]
        levels = [(density(low) - density(high)) / mass for low, high, mass in zip(edges, edges[1:], masses)]
    assert levels == pytest.approx(rotation.LEVELS[bits], abs=2e-7)
    assert edges[1:-1] == pytest.approx(rotation.THRESHOLDS[bits], abs=2e-7)
    # E q^2 = E x q at the optimum, so D = 1 - E q^2.
    assert 1 - 2 * sum(m * q * q for m, q in zip(masses, levels)) == pytest.approx(
        rotation.DISTORTIONS[bits], abs=1e-6
    )


# ---- models


def scalar_transform(values: list) -> list:
    h = 1
    while h < len(values):
        for i in range(0, len(values), 2 * h):
            for j in range(i, i + h):
                a, b = values[j], values[j + h]
                values[j], values[j + h] = a + b, a - b
        h *= 2
    return values


@pytest.mark.parametrize("elements", [1, 31, 32, 33, 500, 1024])
@every_width
def test_encoding_is_the_scalar_model(elements: int, bits: int) -> None:
    x = heavy_tailed(elements, elements)
    size = rotation.rotated_elements(elements)
    words, scales = rotation.encode_rotated(x, bits, KEY, 5 * TILE)
    exponent = math.floor(math.log2(np.abs(x).max()))
    values = [np.float32(v * 2.0**-exponent) for v in (*x, *[0.0] * (size - elements))]
    squares = sum(float(v) ** 2 for v in values)
    for number in (0, 1):
        for i in range(size):
            bit = int(hash32(2 * (5 * TILE // 32 + i // 32) + number, 1, KEY)[0]) >> i % 32 & 1
            values[i] = -values[i] if bit else values[i]
        values = scalar_transform(values)
    unit = np.float32(math.sqrt(squares * size))
    codes, product = [], 0.0
    for value in values:
        index = sum(bool(abs(value) > np.float32(t) * unit) for t in rotation.THRESHOLDS[bits])
        codes.append(index | int(value < 0) << (bits - 1))
        product += abs(float(value)) * float(np.float32(rotation.LEVELS[bits][index]))
    assert rotation.unpack_codes(words, bits, size).tolist() == codes
    assert scales.dtype == np.float32
    assert scales.tolist() == pytest.approx([squares / product * 2.0**exponent], rel=3e-7)


def test_lengths() -> None:
    found = [rotation.rotated_elements(n) for n in (0, 1, 32, 33, 1000, 1024, 1025, 2048, 2100)]
    assert found == [0, 32, 32, 64, 1024, 1024, 1056, 2048, 2112]
    for elements in (0, 1, 1025, 2100):
        words, scales = rotation.encode_rotated(gaussian(0, elements), 3, KEY)
        assert len(words) == code_words(rotation.rotated_elements(elements), 3)
        assert len(scales) == -(-elements // TILE)


@with_and_without_trellis
def test_a_bucket_alone_has_the_bits_that_it_has_among_others(trellis: bool) -> None:
    x = heavy_tailed(1, 3 * TILE + 100)
    everything = decoded(x, 3, trellis)
    words, scales = rotation.encode_rotated(x[TILE:], 3, KEY, TILE, trellis=trellis)
    out = np.empty(len(x) - TILE, np.float32)
    rotation.decode_rotated(words, scales, 3, KEY, 1.0, out, TILE, trellis)
    assert same_bits(out, everything[TILE:])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("elements", [0, 100, 70 * TILE + 33])
@with_and_without_trellis
def test_workers_are_added_in_rank_order(elements: int, dtype: type, trellis: bool) -> None:
    keys = [RngKey(0, "w").key("worker", 0, rank) for rank in range(3)]
    encoded = [
        rotation.encode_rotated(gaussian(rank, elements), 3, key, TILE, trellis=trellis)
        for rank, key in enumerate(keys)
    ]
    words, scales = zip(*encoded)
    total = np.zeros(elements, np.float32)
    for one, units, key in zip(words, scales, keys):
        out = np.empty(elements, np.float32)
        total += rotation.decode_rotated(one, units, 3, key, 0.7, out, TILE, trellis)
    for kernels in (reference, native):
        found = kernels.add_rotated(words, scales, 3, keys, 0.7, np.empty(elements, dtype), TILE, trellis)
        assert same_bits(found, rotation.store_float32(total, np.empty(elements, dtype)))


@every_width
@with_and_without_trellis
def test_what_is_tiny_beside_the_largest_counts_as_zero(bits: int, trellis: bool) -> None:
    """No coordinate is subnormal, so nothing depends on whether a processor keeps such numbers."""
    x = gaussian(5, TILE)
    x[0], x[1::3], x[2::3] = 1.5, 2.0**-61, np.float32(-1e-45)
    without = np.where(np.abs(x) < 2.0**-60, np.float32(0), x)
    for factor in np.float32([1, 2.0**-90]):
        pair = (rotation.encode_rotated(each * factor, bits, KEY, trellis=trellis) for each in (x, without))
        assert all(map(same_bits, *pair))


@pytest.mark.parametrize("size", [32, 128, 256, TILE])
def test_sums_of_terms_are_as_exact_as_scales_need(size: int) -> None:
    """The bound that `lane_sums` states; what its roundings do to a sum is far below float32's last digit."""
    terms = np.abs(np.stack([heavy_tailed(seed, size) for seed in range(50)]))
    exact = [math.fsum(row) for row in terms.tolist()]
    errors = np.abs(rotation.lane_sums(terms) / exact - 1)
    assert errors.max() <= 2.0**-21
    assert np.median(errors) < 2.0**-26


# ---- error


VECTORS = {**UNLIKE_BUCKETS, "short": gaussian(4, 100)}


@every_width
@pytest.mark.parametrize("x", VECTORS.values(), ids=VECTORS)
@with_and_without_trellis
def test_decoding_is_unbiased_over_rotations_and_its_variance_is_the_widths(
    x: np.ndarray, bits: int, trellis: bool
) -> None:
    """Means by the bound of helpers.py (6e-11 a comparison); the variance, D / (1 - D), is of long Gaussian vectors."""
    chain = RngKey(0, "w")
    keys = [chain.key("worker", step) for step in range(part(1000))]
    samples = np.array([decoded(x, bits, trellis, key) for key in keys])
    length = float(np.linalg.norm(x.astype(np.float64)))
    assert_unbiased(samples, x.astype(np.float64), 4 * length, 1e-6 * length)
    errors = ((samples - x.astype(np.float64)) ** 2).sum(axis=1) / length**2
    expected = eden_variance_factor(bits, trellis)
    # Few coordinates, or few different sums of signs, are not quite Gaussian.
    assert_mean(errors, expected, (0.3 if len(x) < TILE else 0.06) * expected)


# ---- bias


LARGEST_BIAS = {1: 1.7, 2: 1.0, 3: 1.0, 4: 0.5}
"""Of docs/rounding.md: in parts of a bucket's norm, times the root of the number of its elements."""

OF_FEW_MAGNITUDES = [[1, 0.9995, 1.0002, 0.9997], [1, 0.95], [1, 0.001]]
"""The first elements of buckets of zeros: about as biased as any that were found."""


def errors_of_means(x: np.ndarray, bits: int, trellis: bool, copies: int) -> tuple[float, float]:
    """Norms of the mean error of elements that are not zero, and of its standard error, relative to the bucket's."""
    chain, exact = RngKey(0, "w"), x.astype(np.float64)
    out, errors = np.empty(len(x), np.float32), np.empty((copies, len(x)))
    for step in range(copies):
        key = chain.key("worker", step)
        encoded = native.encode_rotated(x, bits, key, trellis=trellis)
        native.decode_rotated(*encoded, bits, key, 1.0, out, trellis=trellis)
        errors[step] = out - exact
    norm = np.linalg.norm(exact)
    assert np.abs(errors @ exact).max() < 1e-5 * norm**2
    used = errors[:, x != 0]
    bias, noise = np.linalg.norm(used.mean(axis=0)), np.sqrt(used.var(axis=0).sum() / copies)
    return float(bias / norm), float(noise / norm)


@every_width
@pytest.mark.parametrize("elements", [32, 256, TILE])
def test_bias_is_within_the_bound_that_is_stated(bits: int, elements: int) -> None:
    """The bound is at least 6 standard errors above the bias of these buckets: 1e-9 a comparison with other signs."""
    bound, found = LARGEST_BIAS[bits] / elements**0.5, []
    copies = 8000 if (bits, elements) == (1, 32) else 1000
    for first in OF_FEW_MAGNITUDES:
        x = np.zeros(elements, np.float32)
        x[: len(first)] = first
        found.append(errors_of_means(x, bits, False, copies)[0])
    assert bound / 6 < max(found) <= bound


@every_width
@pytest.mark.parametrize("first", OF_FEW_MAGNITUDES, ids=str)
def test_a_trellis_has_little_bias_in_whole_buckets(bits: int, first: list[float]) -> None:
    """0.3% at most, and 6 standard errors of 0.1%: 1e-9."""
    x = np.zeros(TILE, np.float32)
    x[: len(first)] = first
    assert errors_of_means(x, bits, True, 1000)[0] < 0.009


def test_a_short_bucket_of_many_magnitudes_has_little_bias() -> None:
    """0.3%. The square of the noise has a standard deviation of (0.26%)^2, so the limit is 13 of them away: 1e-9."""
    bias, noise = errors_of_means(gaussian(4, 32), 1, False, 20_000)
    assert bias**2 - noise**2 < 0.01**2


# ---- values out of the ordinary


@every_width
@with_and_without_trellis
def test_zeros_and_what_is_not_finite(bits: int, trellis: bool) -> None:
    x = gaussian(0, 5 * TILE)
    x[:TILE] = np.where(np.arange(TILE) % 2, -0.0, 0.0)
    x[2 * TILE + 7], x[4 * TILE] = np.inf, np.nan
    words, _ = rotation.encode_rotated(x, bits, KEY, trellis=trellis)
    assert not words.reshape(5, -1)[[0, 2, 4]].any()
    result = decoded(x, bits, trellis).reshape(5, TILE)
    assert not result[0].any()
    assert np.isfinite(result[[1, 3]]).all()
    assert np.isnan(result[[2, 4]]).all()


@every_width
@pytest.mark.parametrize("exponent", [127, 100, -90, -95])
@with_and_without_trellis
def test_huge_and_tiny_values_are_as_any_others(bits: int, exponent: int, trellis: bool) -> None:
    x = gaussian(0, TILE)
    x *= np.float32(1.75) / np.abs(x).max()  # 1.75 * 2^127: close to the largest float
    words, scales = rotation.encode_rotated(x, bits, KEY, trellis=trellis)
    scaled = np.ldexp(x, exponent)
    words_of_scaled, scales_of_scaled = rotation.encode_rotated(scaled, bits, KEY, trellis=trellis)
    assert same_bits(words_of_scaled, words)
    assert same_bits(scales_of_scaled, np.ldexp(scales, exponent))


@every_width
def test_buckets_below_the_smallest_norm_are_zeros(bits: int) -> None:
    x = np.ldexp(np.where(np.arange(TILE) == 5, 1.0, 0.25).astype(np.float32), -96)
    assert decoded(x, bits, False).any()
    assert not decoded(x * np.float32(1 - 2.0**-20), bits, False).any()


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.uint16])
@with_and_without_trellis
def test_other_types_are_converted_first_and_last(dtype: type, trellis: bool) -> None:
    wide = heavy_tailed(0, 1500)
    x = rotation.store_float32(wide, np.empty(1500, dtype))
    exact = decoded(rotation.as_float32(x), 3, trellis)
    assert same_bits(decoded(x, 3, trellis), rotation.store_float32(exact, np.empty(1500, dtype)))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="^bits=5: use 1 to 4"):
        rotation.encode_rotated(np.ones(5, np.float32), 5, KEY)
    words, scales = rotation.encode_rotated(np.ones(1025, np.float32), 3, KEY)
    with pytest.raises(ValueError, match="^1 workers' words, 1 workers' scales, 2 keys"):
        rotation.add_rotated([words], [scales], 3, [KEY, KEY], 1.0, np.empty(1025, np.float32))
    with pytest.raises(ValueError, match="^scales: 1 scales for 1025 elements; 2 are needed"):
        rotation.decode_rotated(words, scales[:1], 3, KEY, 1.0, np.empty(1025, np.float32))
