"""Monte Carlo checks use fixed seeds and accept within 6 standard errors: over all seeds, 2 false alarms in
10^9 checks of a normal mean. A seed that passes passes always."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from proofs import bounds
from random_rounding import round_to

from horovod_quant.codecs.rotated_sum_steps import (
    _fraction_variance,
    _rounded_sums,
)
from horovod_quant.codecs.rounding_error import correlated_dither, level_set, rounding_variance

ROUNDING = 1 + 1e-9

vectors = hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-1e3, 1e3, width=32))
matrices = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 6), st.integers(1, 12)),
    elements=st.floats(-1e3, 1e3, width=32),
)
levels_used = st.integers(1, 130)


def assert_mean(samples: np.ndarray, expected: float) -> None:
    error = samples.std(ddof=1) / math.sqrt(len(samples))
    assert abs(samples.mean() - expected) <= 6 * error + 1e-12 * abs(expected)


# ---- stochastic rounding


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("s", [1, 3, 7])
@pytest.mark.parametrize("kind", ["uniform", "exponential"])
def test_exact_variance_is_what_rounding_shows(kind: str, s: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    v = rng.normal(size=50)
    norm = float(np.abs(v).max()) if seed else float(np.linalg.norm(v))
    levels = level_set(kind, s if kind == "uniform" else s + 1)
    drawn = np.sign(v) * norm * round_to(np.tile(np.abs(v) / norm, (4000, 1)), levels, rng)
    exact = getattr(bounds, f"{kind}_rounding_variance")(v, norm, s)
    assert_mean(((drawn - v) ** 2).sum(axis=1), exact)


def test_a_zero_bucket_has_no_variance() -> None:
    assert bounds.uniform_rounding_variance(np.zeros(5), 0.0, 3) == 0
    assert bounds.exponential_rounding_variance([], 0.0, 3) == 0


# ---- QSGD and NUQSGD


@given(v=vectors, s=levels_used)
def test_qsgd_variance_stays_below_the_lemma(v: np.ndarray, s: int) -> None:
    norm = float(np.linalg.norm(v))
    largest = float(np.abs(v).max())
    norm = max(norm, largest)
    exact = bounds.uniform_rounding_variance(v, norm, s)
    assert exact <= bounds.qsgd_variance_factor(v.size, s) * norm**2 * ROUNDING
    assert exact <= bounds.qsgd_dense_variance_factor(v.size, s) * norm**2 * ROUNDING
    in_max_norm = bounds.uniform_rounding_variance(v, largest, s)
    assert in_max_norm <= bounds.qsgd_dense_variance_factor(v.size, s) * largest**2 * ROUNDING


def test_dense_half_is_reached_midway_between_levels() -> None:
    v = np.full(16, 0.5)
    exact = bounds.uniform_rounding_variance(v, 1.0, 1)
    assert exact == bounds.qsgd_dense_variance_factor(16, 1) * 1.0**2


def test_sparse_half_is_nearly_reached_by_equal_elements_at_one_level() -> None:
    d = 10**6
    exact = bounds.uniform_rounding_variance(np.ones(d), math.sqrt(d), 1)
    assert 0.99 < exact / (bounds.qsgd_variance_factor(d, 1) * d) <= 1


@given(v=vectors, s=st.integers(0, 14))
def test_nuqsgd_variance_stays_below_its_bound(v: np.ndarray, s: int) -> None:
    norm = max(float(np.linalg.norm(v)), float(np.abs(v).max()))
    exact = bounds.exponential_rounding_variance(v, norm, s)
    assert exact <= bounds.nuqsgd_variance_factor(v.size, s) * norm**2 * ROUNDING


@pytest.mark.parametrize(("bucket", "s"), [(8, 0), (1024, 2), (8192, 2), (2**16, 6)])
def test_nuqsgd_bound_is_reached_by_equal_magnitudes(bucket: int, s: int) -> None:
    exact = bounds.exponential_rounding_variance(np.ones(bucket), math.sqrt(bucket), s)
    assert exact / bucket == pytest.approx(bounds.nuqsgd_variance_factor(bucket, s))


@pytest.mark.parametrize(("bucket", "s"), [(64, 2), (1024, 6), (8192, 6), (8192, 8)])
def test_nuqsgd_bound_is_all_but_reached_by_two_kinds_of_elements(bucket: int, s: int) -> None:
    # As in the derivation: squares of x in equal small elements, the others at 4/3 of levels, as many as fit.
    small = (4 / 9) ** 2 * 4.0**-s * bucket
    large = []
    for exponent in range(1, s):
        ratio = 4 / 3 * 2.0**-exponent
        large += [ratio] * int((1 - small - np.square(large).sum()) / ratio**2)
    count = bucket - len(large)
    v = np.array(large + [math.sqrt(small / count)] * count)
    exact = bounds.exponential_rounding_variance(v, np.linalg.norm(v), s) / float(v @ v)
    assert 0.94 < exact / bounds.nuqsgd_variance_factor(bucket, s) <= ROUNDING


@pytest.mark.parametrize("s", [0, 2, 6])
def test_nuqsgd_bound_is_below_the_papers_by_an_eighth_at_most(s: int) -> None:
    for bucket in {*range(1, 100), *(k * 4**s // 16 for k in range(16, 200)), 10**6}:
        paper = bounds.nuqsgd_paper_variance_factor(bucket, s)
        assert 0 < paper - bounds.nuqsgd_variance_factor(bucket, s) <= 1 / 8 * ROUNDING


def test_nuqsgd_bounds_with_3_bits() -> None:
    assert bounds.nuqsgd_variance_factor(1024, 2) == 7
    assert bounds.nuqsgd_paper_variance_factor(1024, 2) == 7.125


def test_nuqsgd_eighth_is_reached_at_four_thirds_of_a_level() -> None:
    r = 4 / 3 * 2.0 ** -np.arange(1, 9)
    relative = rounding_variance(r, level_set("exponential", 10)) / r**2
    np.testing.assert_allclose(relative, 1 / 8)


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
def test_exponential_levels_beat_uniform_ones_on_gaussian_buckets_with_the_two_norm(bits: int) -> None:
    v = np.random.default_rng(bits).normal(size=8192)
    norm = float(np.linalg.norm(v))
    uniform = bounds.uniform_rounding_variance(v, norm, 2 ** (bits - 1) - 1)
    assert bounds.exponential_rounding_variance(v, norm, 2 ** (bits - 1) - 2) < uniform


# ---- Global-QSGD


roundings = pytest.mark.parametrize("rounding", ["correlated", "independent"])


@roundings
@given(gradients=matrices, s=levels_used, norm=st.sampled_from(["max", "l2"]))
def test_global_qsgd_error_stays_below_both_bounds(
    gradients: np.ndarray, s: int, norm: str, rounding: str
) -> None:
    exact = bounds.global_qsgd_error(gradients, s, norm, rounding)
    dense, sparse = bounds.global_qsgd_error_bounds(gradients, s, norm, rounding)
    # Where a value is next to a level, its fraction is that of float64's rounding.
    slack = 1e-14 * gradients.size * bounds.global_scale(gradients, norm) ** 2
    assert exact <= dense * ROUNDING
    assert exact <= sparse * ROUNDING + slack


def test_the_correlated_dense_bound_is_reached() -> None:
    # Four workers in two pairs, the second pair's numbers shifted by 1/2: both pairs' sums, of fraction 1/2, are
    # rounded up by the same numbers.
    fractions = np.array([0.25, 0.25, 0.75, 0.75])
    assert bounds.correlated_rounding_variance(fractions) == pytest.approx(1.0)
    gradients = np.concatenate([fractions, [1.0, 1.0, 1.0, 1.0]]).reshape(2, 4).T
    dense, _ = bounds.global_qsgd_error_bounds(gradients, 1, "max")
    assert bounds.global_qsgd_error(gradients, 1, "max") == pytest.approx(dense / 2)  # in one of two elements


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("equal_steps", [True, False])
def test_correlated_rounding_variance_is_what_random_numbers_show(size: int, equal_steps: bool) -> None:
    rng = np.random.default_rng(size)
    fractions = rng.random((size, 12))
    steps = np.ones_like(fractions) if equal_steps else rng.random((size, 12))
    common = rng.random((100_000, 1))
    sums = np.zeros((100_000, 12))
    for rank in range(size):
        c, a = correlated_dither(rank, size)
        sums += steps[rank] * (np.floor(fractions[rank] + np.mod(c * common + a, 1)) - fractions[rank])
    exact = bounds.correlated_rounding_variance(fractions, steps)
    for column, expected in zip(sums.T, exact):
        assert_mean(column**2, expected)


def test_correlated_rounding_variances_by_hand() -> None:
    # Two workers: x (1 - x) of the sum's fraction x.
    np.testing.assert_allclose(
        bounds.correlated_rounding_variance([[0.3, 0.5], [0.4, 0.5]]), [0.21, 0], atol=1e-15
    )
    # One worker: as alone.
    np.testing.assert_allclose(bounds.correlated_rounding_variance([[0.3]]), [0.21])


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        ("different", 2, 0.083), ("different", 4, 0.083), ("different", 16, 0.083),
        ("equal", 2, 0.083), ("equal", 4, 0.042), ("equal", 16, 0.010), ("small", 4, 0.073),
    ],
)  # fmt: skip
def test_correlated_rounding_variances_of_shared_rotation_md(kind: str, size: int, expected: float) -> None:
    rng = np.random.default_rng(1)
    values = {
        "different": lambda: rng.random((size, 40_000)),
        "equal": lambda: np.tile((np.arange(40_000) + 0.5) / 40_000, (size, 1)),
        "small": lambda: np.mod(0.2 * rng.standard_normal((size, 40_000)), 1),
    }[kind]()
    variance = bounds.correlated_rounding_variance(values).mean() / size
    assert variance == pytest.approx(expected, abs=0.0011)
    independent = (values * (1 - values)).mean()
    assert independent == pytest.approx(0.120 if kind == "small" else 1 / 6, abs=0.002)


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("s", [1, 7])
def test_global_qsgd_error_is_what_the_exchange_shows(norm: str, s: int) -> None:
    rng = np.random.default_rng(11)
    gradients = rng.normal(size=(5, 20))
    scale = bounds.global_scale(gradients, norm)
    ratios = np.tile(np.abs(gradients) / scale, (4000, 1, 1))
    integers = np.sign(gradients) * np.rint(s * round_to(ratios, level_set("uniform", s), rng))
    sums = integers.sum(axis=1)
    errors = scale / (s * 5) * sums - gradients.mean(axis=0)
    assert_mean((errors**2).sum(axis=1), bounds.global_qsgd_error(gradients, s, norm, "independent"))
    assert np.abs(sums).max() <= bounds.global_qsgd_sum_limit(5, s, norm)


def test_global_scales_are_the_norms() -> None:
    gradients = [[3.0, 0.0], [0.0, -4.0]]
    assert bounds.global_scale(gradients, "max") == 4
    assert bounds.global_scale(gradients, "l2") == 5
    assert bounds.global_scale([[0.0]], "l2") == 0
    assert bounds.global_scale([[1e-200]], "l2") == 1e-200


@given(workers=st.integers(1, 2000), s=levels_used, data=st.data(), norm=st.sampled_from(["max", "l2"]))
def test_sum_limit_holds_when_every_worker_rounds_up(
    workers: int, s: int, data: st.DataObject, norm: str
) -> None:
    # The worst column holds k equal elements, just above a level so that rounding up gains most.
    k = data.draw(st.integers(1, workers))
    column = np.zeros(workers)
    column[:k] = 1.0
    scale = bounds.global_scale(column[:, None], norm)
    rounded_up = np.minimum(np.ceil(s * column / scale + 1e-9), s)
    assert rounded_up.sum() <= bounds.global_qsgd_sum_limit(workers, s, norm)


def test_sum_limits_are_the_closed_forms() -> None:
    assert bounds.global_qsgd_sum_limit(8, 7, "max") == 56
    assert bounds.global_qsgd_sum_limit(64, 7, "l2") == 7 * 8 + 64
    assert bounds.global_qsgd_sum_limit(10, 7, "l2") == 22 + 10
    # One level: the sum cannot exceed the number of workers whatever the norm.
    assert bounds.global_qsgd_sum_limit(64, 1, "l2") == 64


def test_sum_limit_is_reached_in_the_two_norm() -> None:
    # Each of 10 workers at 7/sqrt(10) = 2.21 levels rounds up to 3; the limit is 32, one column reaches 30.
    column = np.full((10, 1), 1.0)
    levels = np.ceil(7 * column / bounds.global_scale(column, "l2")).sum()
    assert (
        0.9 * bounds.global_qsgd_sum_limit(10, 7, "l2") < levels <= bounds.global_qsgd_sum_limit(10, 7, "l2")
    )


# ---- Global-QSGD with a rotation


@pytest.mark.parametrize(
    ("workers", "step", "factor"), [(2, 0.1, 0.5), (8, 0.1, 0.5), (64, 0.5, 0.5), (64, 3, 1)]
)
def test_the_error_of_a_rotated_sum_is_that_of_its_rounding(workers: int, step: float, factor: float) -> None:
    """``factor`` times the variance of independent rounding, less where few integers are not zero."""
    rng = np.random.default_rng(workers)
    own = rng.standard_normal((workers, 20_000)) / math.sqrt(workers)
    exact = bounds.correlated_rounding_variance(np.mod(own / step, 1.0)).mean()
    terms, deviation = _rounded_sums(workers, True, False)
    found = terms * _fraction_variance(deviation / math.sqrt(workers) / step)
    assert found == pytest.approx(exact, rel=0.06)
    if factor < 1:
        assert found == pytest.approx(factor * workers / 6, rel=0.06)


def test_the_bias_of_a_rotated_sum_by_hand() -> None:
    assert bounds.rotated_sum_bias(3.0, 1e-6) == pytest.approx(3e-6)


# ---- EDEN


def test_the_ratio_of_energies_tells_what_gradients_have_in_common() -> None:
    rng = np.random.default_rng(0)
    own, common = rng.standard_normal((8, 2**16)), rng.standard_normal(2**16)
    for share in (0.0, 0.1, 1.0):
        gradients = math.sqrt(share) * common + math.sqrt(1 - share) * own
        assert bounds.energy_ratio(gradients) == pytest.approx(1 / (1 + 7 * share), rel=0.03)
    assert bounds.energy_ratio([[1.0, 2.0]]) == 1
    with pytest.raises(ValueError, match="average of zero"):
        bounds.energy_ratio([[1.0], [-1.0]])


# ---- BinSGDM


def test_one_bit_variances_are_those_of_all_outcomes() -> None:
    u = np.array([0.3, -0.8, 0.0, 1.0])
    mean = second = 0.0
    for bits in itertools.product([-1, 1], repeat=4):
        p = np.prod((1 + u * bits) / 2)
        mean += p * np.mean(bits)
        second += p * np.mean(bits) ** 2
    np.testing.assert_allclose(bounds.one_bit_average_variance(u), second - mean**2)
    np.testing.assert_allclose(bounds.one_bit_server_variance(u), 1 - second)
    np.testing.assert_allclose(bounds.one_bit_variance(u), [0.91, 0.36, 1, 0])


@given(u=hnp.arrays(np.float64, (5, 3), elements=st.floats(-1, 1)))
def test_both_binarizations_add_up_to_the_variance_of_the_final_bit(u: np.ndarray) -> None:
    total = bounds.one_bit_average_variance(u) + bounds.one_bit_server_variance(u)
    np.testing.assert_allclose(total, bounds.one_bit_variance(u.mean(axis=0)), atol=1e-12)
    assert (bounds.one_bit_server_variance(u) >= -1e-12).all()


def test_one_bit_exchange_shows_its_variances() -> None:
    rng = np.random.default_rng(12)
    u = rng.uniform(-1, 1, (8, 30))
    average = np.where(rng.random((4000, 8, 30)) < (1 + u) / 2, 1, -1).mean(axis=1)
    final = np.where(rng.random((4000, 30)) < (1 + average) / 2, 1, -1)
    mean = u.mean(axis=0)
    assert_mean(((average - mean) ** 2).sum(axis=1), bounds.one_bit_average_variance(u).sum())
    assert_mean(((final - average) ** 2).sum(axis=1), bounds.one_bit_server_variance(u).sum())
    assert_mean(((final - mean) ** 2).sum(axis=1), bounds.one_bit_variance(mean).sum())


# ---- arguments


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bounds.uniform_rounding_variance([3.0], 2.0, 1), ValueError, "norm=2.0 must be .* at least"),
        (lambda: bounds.uniform_rounding_variance([3.0], math.inf, 1), ValueError, "norm=inf must be finite"),
        (lambda: bounds.uniform_rounding_variance([math.nan], 2.0, 1), ValueError, "v has .* not finite"),
        (lambda: bounds.exponential_rounding_variance([[1.0]], 2.0, 1), ValueError, "v has shape .* flat"),
        (lambda: bounds.qsgd_variance_factor(0, 1), ValueError, "bucket=0 must be 1 or larger"),
        (lambda: bounds.nuqsgd_variance_factor(4, 1.5), TypeError, "s=1.5 must be an integer"),
        (lambda: bounds.global_scale([1.0], "max"), ValueError, r"gradients has shape \(1,\)"),
        (lambda: bounds.global_scale([[1.0]], "l1"), ValueError, "norm='l1' is unknown; use 'max' or 'l2'"),
        (lambda: bounds.global_scale([[math.inf]], "max"), ValueError, "gradients has .* not finite"),
        (lambda: bounds.global_qsgd_error_bounds([[1.0]], 0, "max"), ValueError, "s=0 must be"),
        (lambda: bounds.global_qsgd_sum_limit(0, 1, "max"), ValueError, "workers=0 must be 1 or larger"),
        (lambda: bounds.global_qsgd_sum_limit(1, 1, "inf"), ValueError, "norm='inf' is unknown"),
        (lambda: bounds.rotated_sum_bias(1.0, 2.0), ValueError, "no error and probability"),
        (lambda: bounds.one_bit_variance(1.01), ValueError, r"u has elements outside \[-1, 1\]"),
        (lambda: bounds.one_bit_average_variance(0.5), ValueError, "first axis must be the workers"),
        (
            lambda: bounds.one_bit_server_variance(np.zeros((0, 3))),
            ValueError,
            "first axis must be the workers",
        ),
    ],
)
def test_bad_arguments_are_named(call, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
