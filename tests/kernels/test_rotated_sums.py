"""The kernels of sums that fit their fields only as sums: against a model, and what their checks find."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import gaussian, heavy_tailed, same_bits

from horovod_quant.kernels import native, reference, rotated_sums, rotation
from horovod_quant.kernels.keys import Key, RngKey, hash32
from horovod_quant.kernels.layout import ROW, TILE

SIGNS, KEY = Key(0x12345678, 0x9ABCDEF0), Key(1, 2)
WIDTHS = range(4, 9)
both_backends = pytest.mark.parametrize("kernels", [reference, native], ids=lambda kernels: kernels.NAME)


def steps_of(elements: int, step: float) -> np.ndarray:
    return np.full(-(-elements // TILE), step, np.float32)


# ---- models


@pytest.mark.parametrize("elements", [1, 33, 1024])
def test_encoding_is_the_scalar_model(elements: int) -> None:
    x, start = heavy_tailed(elements, elements), 5 * TILE
    size = rotation.rotated_elements(elements)
    z = np.concatenate([x, np.zeros(size - elements, np.float32)]).astype(np.float64) / size
    hadamard = np.array([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])
    for number in (0, 1):
        hashes = hash32(2 * start // ROW, 2 * (size // ROW), SIGNS)[number::2]
        z = hadamard @ (
            z * (1.0 - 2.0 * (np.repeat(hashes, ROW) >> np.tile(np.arange(ROW), size // ROW) & 1))
        )
    assert np.linalg.norm(z) == pytest.approx(np.linalg.norm(x.astype(np.float64)), rel=1e-12)

    samples = reference.rotated_samples(x, 40, SIGNS, start)
    assert samples == pytest.approx([*z[:40], *[0.0] * (40 - size)], abs=1e-5 * np.abs(z).max())
    words, checks = reference.encode_rotated_sum(x, steps_of(elements, 0.25), 8, SIGNS, KEY, start)
    digits = np.floor(z / 0.25 + (hash32(start, size, KEY) >> 8) * 2.0**-24).astype(int)
    sure = np.abs(z / 0.25 + (hash32(start, size, KEY) >> 8) * 2.0**-24 - np.rint(digits)) > 1e-4
    found = reference.unpack_sum(words, 8, size)
    assert (np.mod(found - digits, 256)[sure] == 0).all()
    assert sure.mean() > 0.9
    in_field = np.abs(digits) < 128
    assert in_field.all()
    assert checks.tolist() == reference.rotated_sum_checks(words, 8, elements).tolist()


@both_backends
@pytest.mark.parametrize("width", WIDTHS)
def test_only_the_sum_has_to_fit(kernels: Any, width: int) -> None:
    """Two workers' digits are far out of their fields, and cancel."""
    elements = 2 * TILE + 100
    x, small = 50 * gaussian(0, elements), gaussian(1, elements)
    keys = [RngKey(0, "w").correlated("worker", 0, rank, 2) for rank in range(2)]
    step = steps_of(elements, 1.0)
    sent = [
        kernels.encode_rotated_sum(one, step, width, SIGNS, key, TILE)
        for one, key in zip((x, small - x), keys)
    ]
    words, checks = (first + second for first, second in zip(*sent))
    assert same_bits(kernels.rotated_sum_checks(words, width, elements), checks)
    out = np.empty(elements, np.float32)
    kernels.decode_rotated_sum(words, step, width, SIGNS, 0.5, out, TILE)
    # Of a pair the error's variance is x (1 - x), x the fraction of the sum: at most 1/4.
    assert ((2 * out - small) ** 2).mean() < 0.25


def test_other_types_zeros_and_what_is_not_finite() -> None:
    x = gaussian(0, 4 * TILE)
    x[TILE + 5], x[3 * TILE] = np.nan, np.inf
    steps = np.float32([0.1, np.nan, 0.0, np.inf])
    words, checks = reference.encode_rotated_sum(x, steps, 8, SIGNS, KEY)
    digits = reference.unpack_sum(words, 8, len(x)).reshape(4, TILE)
    assert digits[0].any()
    assert not digits[1:].any()
    assert not checks[1:].any()
    for dtype in (np.float16, np.uint16, np.float64):
        narrow = reference.store_float32(x[:TILE], np.empty(TILE, dtype))
        wide = reference.as_float32(narrow)
        same = [reference.encode_rotated_sum(one, steps, 8, SIGNS, KEY) for one in (narrow, wide)]
        assert all(map(same_bits, *same))
    out = reference.decode_rotated_sum(words, steps, 8, SIGNS, 1.0, np.empty(len(x), np.float32)).reshape(
        4, -1
    )
    assert np.isnan(out[[1]]).all()
    assert not out[2].any()


def test_what_does_not_fit_is_refused() -> None:
    words, _ = reference.encode_rotated_sum(np.ones(1025, np.float32), steps_of(1025, 1), 8, SIGNS, KEY)
    for kernels in (reference, native):
        with pytest.raises(ValueError, match="^steps: 1 step sizes for 1025 elements; 2 are needed"):
            kernels.encode_rotated_sum(np.ones(1025, np.float32), steps_of(5, 1), 8, SIGNS, KEY)
        with pytest.raises(ValueError, match="^steps: 1 step sizes for 1025 elements; 2 are needed"):
            kernels.decode_rotated_sum(words, steps_of(5, 1), 8, SIGNS, 1.0, np.empty(1025, np.float32))
        with pytest.raises(ValueError, match="^words: 287 words cannot hold 1056 digits of 8 bits"):
            kernels.rotated_sum_checks(words[1:], 8, 1025)


# ---- checks


@pytest.mark.parametrize("width", WIDTHS)
def test_one_or_two_sums_that_leave_their_fields_always_change_the_check(width: int) -> None:
    """A field that overflows is off by 2^width, and the next one of its word by one, at every place of a word."""
    weights = rotated_sums.WEIGHTS
    above = np.zeros(TILE, np.uint32)
    above[:-ROW] = weights[ROW:]  # the last ones carry into another tile, whose check may differ instead
    fields = 32 // width
    for shift in range(fields):
        place = (np.arange(TILE) // ROW + shift) % fields
        changes = np.where(place == fields - 1, np.uint32(0), above) - (weights << np.uint32(width))
        up_and_down = np.concatenate([changes, -changes])
        assert up_and_down.all()
        assert len(np.unique(up_and_down)) == 2 * TILE


@both_backends
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_that_leave_their_fields_change_the_check(kernels: Any, width: int) -> None:
    elements = 3 * TILE
    for seed in range(20):
        x = gaussian(seed, elements)
        step = steps_of(elements, 1e-3)
        step[1] = np.abs(x).max() * 64  # small sums among those that are out of their fields
        words, checks = kernels.encode_rotated_sum(x, step, width, SIGNS, KEY)
        found = kernels.rotated_sum_checks(words, width, elements)
        assert (found != checks)[[0, 2]].all()


@both_backends
def test_an_empty_gradient_has_no_words(kernels: Any) -> None:
    nothing = np.zeros(0, np.float32)
    words, checks = kernels.encode_rotated_sum(nothing, nothing, 8, SIGNS, KEY)
    assert len(words) == len(checks) == len(kernels.rotated_sum_checks(words, 8, 0)) == 0
    assert len(kernels.rotated_samples(nothing, 8, SIGNS)) == 0
