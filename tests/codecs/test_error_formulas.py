"""The formulas of levels, step sizes and errors that the schemes use."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from horovod_quant.codecs.rotated_codes import eden_nmse, eden_variance_factor
from horovod_quant.codecs.rotated_sum_steps import OVERFLOWS, estimate_margin, rotated_sum_step
from horovod_quant.codecs.rounding_error import level_set, rounding_variance


def test_level_sets_are_the_published_ones() -> None:
    assert level_set("uniform", 4).tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert level_set("exponential", 4).tolist() == [0, 0.125, 0.25, 0.5, 1]
    assert level_set("exponential", 1).tolist() == [0, 1]


def test_variance_is_zero_on_levels_and_largest_midway() -> None:
    levels = level_set("exponential", 3)
    assert rounding_variance(levels, levels).tolist() == [0, 0, 0, 0]
    middles = (levels[1:] + levels[:-1]) / 2
    np.testing.assert_allclose(rounding_variance(middles, levels), np.diff(levels) ** 2 / 4)
    assert rounding_variance(0.5, [0, 1]) == 0.25


def test_the_step_of_a_sum_leaves_room_for_its_tail() -> None:
    """With few workers, whose rounding does not count, z deviations fill half of the field."""
    z = -NormalDist().inv_cdf(OVERFLOWS / 2048)
    for bits in (6, 8):
        assert rotated_sum_step(bits, 2) == pytest.approx(z / 2 ** (bits - 1), rel=0.01)
    # With many, their errors, of variance 1/12 each, fill a part of it.
    room = math.sqrt(128**2 - z**2 * 1024 / 12)
    assert rotated_sum_step(8, 1024) == pytest.approx(z / room, rel=0.01)
    for bits in (4, 8):
        for workers in (3, 64, 10**6):
            assert rotated_sum_step(bits, workers) <= rotated_sum_step(bits, 2 * workers)
            assert rotated_sum_step(bits, workers, "independent") >= rotated_sum_step(bits, workers)


def test_a_norm_that_is_estimated_has_a_margin() -> None:
    """The mean of a normal variable's tail over estimates is what it is without one, or less."""
    z2 = NormalDist().inv_cdf(OVERFLOWS / 2048) ** 2
    for samples in (8, 32, 128):
        x = np.random.default_rng(samples).chisquare(samples, 2**16) / samples
        mean = (1 + z2 * estimate_margin(samples) / samples) ** (-samples / 2)
        assert mean == pytest.approx(math.exp(-z2 / 2), rel=1e-3)
        # That this is the mean of exp(-z^2 m X / 2) is seen where it is not so rare a thing.
        less = z2 * estimate_margin(samples) / 64
        assert np.exp(-less * x / 2).mean() == pytest.approx((1 + less / samples) ** (-samples / 2), rel=0.02)
    assert estimate_margin(10**6) == pytest.approx(1, abs=1e-4)
    assert estimate_margin(128) == pytest.approx(1.169, abs=2e-3)


def test_edens_variances_are_those_of_levels_for_a_gaussian() -> None:
    factors = [eden_variance_factor(bits) for bits in (1, 2, 3, 4)]
    assert factors == pytest.approx([math.pi / 2 - 1, 0.1331, 0.0358, 0.0096], abs=5e-5)
    z = np.random.default_rng(0).standard_normal(2**20)
    q = np.sign(z) * np.where(np.abs(z) < 0.9815988, 0.45278, 1.5104176)
    estimate = (z @ z) / (z @ q) * q
    # Of 2^20 draws the error is within 1%: each deviates by less than 2 of the mean.
    assert ((estimate - z) ** 2).mean() == pytest.approx(factors[1], rel=0.01)
    for with_trellis in (False, True):
        with pytest.raises(ValueError, match="bits=5: use 1 to 4"):
            eden_variance_factor(5, with_trellis)


def test_errors_of_edens_exchanges_by_hand() -> None:
    up, down = eden_variance_factor(2), eden_variance_factor(4)
    assert eden_nmse(2) == up
    assert eden_nmse(2, ratio=0.25) == up / 4
    assert eden_nmse(2, 4, 0.25) == pytest.approx(up / 4 + down * (1 + up / 4))
    up, down = eden_variance_factor(2, True), eden_variance_factor(4, True)
    assert up < 0.8 * eden_variance_factor(2)
    assert eden_nmse(2, 4, 0.25, True) == pytest.approx(up / 4 + down * (1 + up / 4))
    with pytest.raises(ValueError, match="ratio=0"):
        eden_nmse(2, ratio=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rotated_sum_step(8, 2, "other"), ValueError, "rounding='other'"),
        (lambda: rounding_variance(1.5, [0, 1]), ValueError, "r has elements outside"),
        (lambda: rounding_variance(math.nan, [0, 1]), ValueError, "r has elements outside"),
        (lambda: rounding_variance(0.5, [0, 2]), ValueError, "levels=.* must ascend from 0 to 1"),
        (lambda: rounding_variance(0.5, [1]), ValueError, "levels=.* must ascend from 0 to 1"),
    ],
)
def test_bad_arguments_are_named(call, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
