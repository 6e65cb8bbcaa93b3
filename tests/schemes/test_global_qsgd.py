from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
from helpers import assert_mean, examples, gaussian, heavy_tailed, lockstep, same_bits, simulate
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from proofs import bounds

from horovod_quant.codecs.rounding_error import level_set
from horovod_quant.kernels import reference
from horovod_quant.kernels.keys import RngKey
from horovod_quant.schemes import GlobalQSGD
from horovod_quant.schemes.base import Gradient, Workers

COPIES = 1500
BUCKET = 480
norms = pytest.mark.parametrize("norm", ["max", "l2"])


def workers(kind: str, size: int) -> np.ndarray:
    return {
        "gaussian": lambda: gaussian(0, size, BUCKET),
        "heavy-tailed": lambda: heavy_tailed(1, size, BUCKET),
        "equal": lambda: np.full((size, BUCKET), 0.7, np.float32),
        "unequal scales": lambda: gaussian(2, size, BUCKET) * np.float32(10.0) ** -np.arange(size)[:, None],
    }[kind]()


def squared_errors(scheme: GlobalQSGD, gradients: np.ndarray, **arguments: bool) -> np.ndarray:
    """``||estimate - average||^2`` of independent exchanges of one bucket."""
    result = simulate(scheme, [np.tile(g, COPIES) for g in gradients], **arguments)
    errors = result.decoded[0][0].reshape(COPIES, -1) - gradients.mean(axis=0, dtype=np.float64)
    return (errors**2).sum(axis=1)


# ---- error


@norms
@pytest.mark.parametrize("rounding", ["correlated", "independent"])
@pytest.mark.parametrize("kind", ["gaussian", "heavy-tailed", "equal", "unequal scales"])
@pytest.mark.parametrize(("bits", "size"), [(2, 1), (4, 3), (8, 3), (8, 8), (12, 2)])
def test_error_is_the_exact_one_and_below_both_bounds(
    kind: str, rounding: str, norm: str, bits: int, size: int
) -> None:
    scheme, gradients = GlobalQSGD(bits, norm, bucket_size=BUCKET, rounding=rounding), workers(kind, size)
    levels = scheme.levels_for(size)
    errors = squared_errors(scheme, gradients)
    scale = bounds.global_scale(gradients, norm)
    own = BUCKET * (scale * 2.0**-22) ** 2  # float32's own, where a gradient lies on the levels
    assert_mean(errors, bounds.global_qsgd_error(gradients, levels, norm, rounding), own)
    limit = min(bounds.global_qsgd_error_bounds(gradients, levels, norm, rounding))
    assert errors.mean() <= limit * (1 + 6 / math.sqrt(COPIES)) + own


def test_error_falls_with_the_number_of_workers_at_equal_levels() -> None:
    # E||est - avg||^2 = N^2 / (s^2 n^2) sum_ij f_ij (1 - f_ij), f the fraction of s |g_ij| / N: for n equal gradients
    # and the max norm exactly 1/n of one worker's. s = 7 takes 4 bits for 1 worker, a bit more for each doubling.
    gradient = workers("gaussian", 1)
    fractions = np.modf(7 * np.abs(gradient[0].astype(np.float64)) / np.abs(gradient).max())[0]
    one = float(np.abs(gradient).max() / 7) ** 2 * (fractions * (1 - fractions)).sum()
    for bits, size in ((4, 1), (5, 2), (6, 4), (7, 8), (8, 16)):
        scheme = GlobalQSGD(bits, bucket_size=BUCKET, rounding="independent")
        assert scheme.levels_for(size) == 7
        assert_mean(squared_errors(scheme, np.repeat(gradient, size, axis=0)), one / size)


def draw_exponential(values: np.ndarray, s: int, rng: np.random.Generator) -> np.ndarray:
    """Signed stochastic rounding to the levels 0, 2^-s, ..., 1, of ratios, by another generator."""
    levels = level_set("exponential", s + 1)
    r = np.abs(values)
    above = np.clip(np.searchsorted(levels, r, side="right"), 1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    return np.sign(values) * np.where(rng.random(r.shape) * (high - low) < r - low, high, low)


def assert_same_mean(a: np.ndarray, b: np.ndarray) -> None:
    """Two samples: means within 6 standard errors of their difference."""
    assert abs(a.mean() - b.mean()) < 6 * math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))


@norms
@pytest.mark.parametrize(("bits", "size"), [(2, 3), (4, 2), (4, 5)])
def test_error_of_served_exponential_levels_is_that_of_independent_draws(
    norm: str, bits: int, size: int
) -> None:
    gradients = workers("gaussian", size)[:, :64]
    scheme = GlobalQSGD(bits, norm, "exponential", 64, "independent")
    rng, s = np.random.default_rng(bits), 2 ** (bits - 1) - 2
    scale = bounds.global_scale(gradients, norm)
    first = draw_exponential(np.tile(gradients / scale, (COPIES, 1, 1)), s, rng)
    served = draw_exponential(first.sum(axis=1) / size, s, rng)
    expected = ((served * scale - gradients.mean(axis=0)) ** 2).sum(axis=1)
    assert_same_mean(squared_errors(scheme, gradients), expected)


def add_drawn(a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The sum of two signed powers of two (or zeros), rounded to one of its neighbouring powers."""
    total = a + b
    with np.errstate(divide="ignore"):
        low = np.where(total == 0, 0, 2.0 ** np.floor(np.log2(np.abs(total))))
    up = rng.random(a.shape) * low < np.abs(total) - low
    return np.sign(total) * np.where(up, 2 * low, low)


@norms
@pytest.mark.parametrize(("bits", "size"), [(2, 3), (4, 2), (4, 5)])
def test_error_of_reduced_exponential_levels_is_that_of_independent_draws(
    norm: str, bits: int, size: int
) -> None:
    gradients = workers("gaussian", size)[:, :64]
    scheme = GlobalQSGD(bits, norm, "exponential", 64, "independent")
    rng = np.random.default_rng(bits)
    scale = bounds.global_scale(gradients, norm)
    drawn = draw_exponential(np.tile(gradients / scale, (COPIES, 1, 1)), 2 ** (bits - 1) - 2, rng)
    total = drawn[:, 0]
    for rank in range(1, size):
        total = add_drawn(total, drawn[:, rank], rng)
    expected = ((total * scale / size - gradients.mean(axis=0)) ** 2).sum(axis=1)
    assert_same_mean(squared_errors(scheme, gradients, custom_reduction=True), expected)


# ---- the sum of the integers


def test_levels_are_those_of_the_formulas() -> None:
    assert [GlobalQSGD(8).levels_for(n) for n in (1, 2, 3, 4, 127, 128)] == [127, 63, 42, 31, 1, 0]
    assert [GlobalQSGD(bits).levels_for(4) for bits in (2, 3, 4, 5, 16)] == [0, 0, 1, 3, 8191]
    # (127 - 4) / 2 = 61.5, (127 - 9) / 3 = 39.3, (127 - 64) / 8 = 7.9; n s <= M where that allows more levels.
    assert [GlobalQSGD(8, "l2").levels_for(n) for n in (1, 4, 9, 64, 127)] == [127, 61, 39, 7, 1]
    for norm in ("max", "l2"):
        for bits in range(2, 17):
            for n in range(1, 200):
                s = GlobalQSGD(bits, norm).levels_for(n)
                assert s == 0 or bounds.global_qsgd_sum_limit(n, s, norm) <= 2 ** (bits - 1) - 1


def sums_of_digits(scheme: GlobalQSGD, gradients: np.ndarray, random_bits: int) -> np.ndarray:
    """The workers' integers added without fields, with the same random bits for every element."""
    if scheme.norm == "max":
        scale = reference.bucket_maxima(np.abs(gradients).max(axis=0), scheme.bucket_size)
    else:
        squares = [reference.bucket_square_sums(g, scheme.bucket_size) for g in gradients]
        scale = reference.norms_of_square_sums(np.add.reduce(squares))
    levels = scheme.levels_for(len(gradients))
    with mock.patch.object(reference, "hash32", lambda start, n, key: np.full(n, random_bits, np.uint32)):
        digits = [
            reference.round_uniform(g, scale, scheme.bucket_size, levels, RngKey(0, "").key("", 0))
            for g in gradients
        ]
    return np.sum(digits, axis=0, dtype=np.int64)


def usable(norm: str, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    pairs = [(bits, size) for bits in range(2, 17) for size in sizes]
    return [(bits, size) for bits, size in pairs if GlobalQSGD(bits, norm).levels_for(size)]


@norms
@pytest.mark.parametrize("random_bits", [0, 0xFFFFFFFF], ids=["rounded down", "rounded up"])
def test_sums_stay_in_their_fields_in_the_worst_cases(norm: str, random_bits: int) -> None:
    for bits, size in usable(norm, (1, 2, 3, 5, 8, 1000)):
        # One non-zero column a bucket. With the two-norm equal values on k workers are the worst case of the
        # Cauchy-Schwarz bound; the rest of the scale sits on the other workers, in another column.
        columns = sorted({1, 2, size // 2, size - 1, size} - {0})
        gradients = np.zeros((size, 32 * 4 * len(columns)), np.float32)
        for i, k in enumerate(columns):
            if k > size:
                continue
            for j, sign in enumerate((1, -1)):
                gradients[:k, 64 * 2 * i + 64 * j] = sign
            gradients[:k, 64 * 2 * i + 32] = np.where(np.arange(k) % 2, 1, -1)
            gradients[:k, 64 * 2 * i + 96] = 1 + np.arange(k) * np.float32(1e-7)
        totals = sums_of_digits(GlobalQSGD(bits, norm, bucket_size=32), gradients, random_bits)
        assert np.abs(totals).max() <= 2 ** (bits - 1) - 1, (bits, size)


@norms
@examples(150)
@given(data=st.data())
def test_sums_stay_in_their_fields_whatever_the_gradients(norm: str, data: st.DataObject) -> None:
    bits, size = data.draw(st.sampled_from(usable(norm, (1, 2, 3, 5, 8, 20, 100))))
    values = st.one_of(st.floats(-1, 1, width=32), st.sampled_from([1.0, -1.0, 0.5, 2.0**127, 2.0**-90]))
    few = data.draw(
        hnp.arrays(np.float32, (size, 3), elements=values, fill=st.sampled_from([0.0, 1.0, -1.0]))
    )
    gradients = np.zeros((size, 32), np.float32)
    gradients[:, :3] = few
    scheme = GlobalQSGD(bits, norm, bucket_size=32)
    totals = sums_of_digits(scheme, gradients, data.draw(st.sampled_from([0, 0xFFFFFFFF])))
    assert np.abs(totals).max() <= 2 ** (bits - 1) - 1


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 1000])
def test_extreme_gradients_come_back_exactly(size: int) -> None:
    rows = np.arange(33 * 32) // 32
    for bits, _ in usable("max", (size,)):
        if size == 1000 and bits not in (11, 16):
            continue
        for signs in (rows * 0 + 1, rows * 0 - 1, rows % 2 * 2 - 1):
            decoded = simulate(GlobalQSGD(bits, bucket_size=32), [signs.astype(np.float32)] * size).decoded[
                0
            ][0]
            np.testing.assert_allclose(decoded, signs, rtol=3e-7)


@pytest.mark.parametrize("size", [2, 4, 64, 256])
def test_powers_of_two_of_equal_gradients_double_exactly_in_a_balanced_reduction(size: int) -> None:
    def balanced(low: int, high: int) -> list:
        middle = (low + high) // 2
        return (
            [*balanced(low, middle), *balanced(middle, high), (low, middle, high)] if high - low > 1 else []
        )

    # 8 bits and 256 workers: the largest index is 127 + 8, beyond int8.
    gradient = np.float32([1, -0.5, 0.125, 0, 2.0**-20])
    scheme = GlobalQSGD(8, levels="exponential", bucket_size=32)
    result = simulate(scheme, [gradient] * size, custom_reduction=True, merges=balanced(0, size))
    assert result.decoded[0][0].tolist() == gradient.tolist()
    assert result.bytes_sent["customallreduce"] == 2 * (size - 1) / size * 5 * 2  # int16


def test_the_bracketing_of_a_reduction_selects_its_random_bits() -> None:
    gradients = [gaussian(i, 3000) for i in range(4)]
    scheme = GlobalQSGD(4, levels="exponential")
    left = simulate(scheme, gradients, custom_reduction=True).decoded[0][0]
    merges = [(0, 1, 2), (0, 2, 3), (0, 3, 4)]
    assert same_bits(simulate(scheme, gradients, custom_reduction=True, merges=merges).decoded[0][0], left)
    merges = [(0, 1, 2), (2, 3, 4), (0, 2, 4)]
    assert not same_bits(
        simulate(scheme, gradients, custom_reduction=True, merges=merges).decoded[0][0], left
    )


@pytest.mark.parametrize("levels", ["uniform", "exponential"])
def test_all_workers_are_counted(levels: str) -> None:
    finished = lockstep(GlobalQSGD(8, levels=levels), [[gaussian(i, 100)] for i in range(5)])
    assert [result.active for result in finished] == [5] * 5


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 0}, "bits=0: use an integer from 2 to 16"),
        ({"bits": 1}, "bits=1: use an integer from 2 to 16"),
        ({"bits": 17}, "bits=17: use an integer from 2 to 16"),
        ({"bits": True}, "bits=True: use an integer from 2 to 16"),
        ({"bits": 9, "levels": "exponential"}, "bits=9: use an integer from 2 to 8"),
        ({"norm": "inf"}, "norm='inf': use one of 'max', 'l2'"),
        ({"levels": "linear"}, "levels='linear': use one of 'uniform', 'exponential'"),
        ({"bucket_size": 100}, "bucket_size=100: use a multiple of 32, for example 1024"),
        ({"bucket_size": False}, "bucket_size=False: use a multiple of 32"),
        (
            {"bucket_size": 96, "levels": "exponential"},
            "bucket_size=96: with levels='exponential' use a divisor or a multiple of 1024",
        ),
    ],
)
def test_bad_arguments_are_named_with_what_would_work(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        GlobalQSGD(**arguments)


@pytest.mark.parametrize(
    ("scheme", "size", "message"),
    [
        (GlobalQSGD(3), 8, "bits=3: .* 8 workers need bits >= 5 with norm='max'$"),
        (GlobalQSGD(3, "l2"), 8, "bits=3: .* 8 workers need bits >= 5 with norm='l2'$"),
        (GlobalQSGD(2), 2, "bits=2: .* 2 workers need bits >= 3 with norm='max'$"),
        (GlobalQSGD(10), 1000, "bits=10: .* 1000 workers need bits >= 11 with norm='max'$"),
        (
            GlobalQSGD(16),
            32768,
            "bits=16: .* 32768 workers are too many .*; use levels='exponential', or rotate=True$",
        ),
    ],
)
def test_too_few_bits_for_the_workers_are_refused_before_any_collective(
    scheme: GlobalQSGD, size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        scheme.check_workers(size)
    exchange = scheme.begin([Gradient(np.ones(5, np.float32), RngKey(0, "w"))], Workers(0, size), reference)
    with pytest.raises(ValueError, match=message):
        next(exchange)


def test_what_would_work_works() -> None:
    GlobalQSGD(5).check_workers(8)
    GlobalQSGD(16).check_workers(32767)
    GlobalQSGD(2, levels="exponential").check_workers(10**6)


def test_more_workers_than_a_pairwise_reduction_can_count_are_refused() -> None:
    scheme = GlobalQSGD(8, levels="exponential")
    members = [Gradient(np.ones(5, np.float32), RngKey(0, "w"))]
    exchange = scheme.begin(members, Workers(0, 40_000, custom_reduction=True), reference)
    with pytest.raises(ValueError, match="40000 workers are too many to reduce exponential levels pairwise"):
        exchange.send(next(exchange).array)


def test_numpys_integers_are_integers() -> None:
    scheme = GlobalQSGD(np.int64(8), bucket_size=np.uint16(64))
    assert scheme == GlobalQSGD(8, bucket_size=64)
    gradients = [gaussian(i, 100) for i in range(2)]
    expected = simulate(GlobalQSGD(8, bucket_size=64), gradients).decoded[0][0]
    assert same_bits(simulate(scheme, gradients).decoded[0][0], expected)
