"""Trellis-coded quantization: the best path by trying all of them, levels and error by many normal variables."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import gaussian, heavy_tailed, part

from horovod_quant.kernels import rotation, trellis
from horovod_quant.kernels.layout import ROW, TILE

every_width = pytest.mark.parametrize("bits", [1, 2, 3, 4])


def codes_of(z: np.ndarray, bits: int, units: np.ndarray | None = None) -> np.ndarray:
    units = np.ones(len(z), np.float32) if units is None else units
    return trellis.trellis_codes(z, units, bits, rotation.LEVELS[bits])


def values_of(codes: np.ndarray, bits: int) -> np.ndarray:
    return trellis.trellis_values(codes, bits, rotation.LEVELS[bits])


def levels_by_codes(sequence: tuple[int, ...], bits: int) -> list[float]:
    """Of one lane's codes, a row after another."""
    first = trellis.ascending(rotation.LEVELS[bits])
    levels = trellis.ascending(trellis.LEVELS[bits])
    found = [first[sequence[0]]]
    for row in range(1, len(sequence)):
        branch, before = sequence[row] % 2, sequence[row - 1] % 2
        earlier = sequence[row - 2] % 2 if row > 1 else 0
        found.append(levels[4 * (sequence[row] // 2) + before + 2 * (branch != earlier)])
    return found


@pytest.mark.parametrize(("bits", "rows"), [(1, 1), (1, 2), (1, 8), (2, 1), (2, 4), (3, 2), (4, 2)])
def test_no_codes_have_levels_that_are_closer(bits: int, rows: int) -> None:
    """All sequences of a lane's codes, for 96 lanes."""
    z = gaussian(bits, 3, rows * ROW) * np.float32([[1.0], [3.0], [0.1]])
    units = np.float32([1.0, 2.5, 0.1])
    sequences = np.array(list(itertools.product(range(2**bits), repeat=rows)))
    possible = np.array([levels_by_codes(tuple(one), bits) for one in sequences.tolist()])
    for one, unit, codes in zip(z.reshape(3, rows, ROW), units, codes_of(z, bits, units)):
        distances = ((one.T[:, None].astype(np.float64) - possible * unit) ** 2).sum(axis=2)
        numbers = codes.reshape(rows, ROW).T.astype(np.int64) @ (2**bits) ** np.arange(rows)[::-1]
        found = distances[np.arange(ROW), numbers]
        assert found == pytest.approx(distances.min(axis=1), rel=1e-5, abs=1e-6)


@every_width
def test_values_are_those_of_the_codes_before(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (2, 8 * ROW)).astype(np.uint32)
    values = values_of(codes, bits).reshape(2, 8, ROW)
    for bucket, lane in itertools.product(range(2), range(ROW)):
        one = tuple(codes.reshape(2, 8, ROW)[bucket, :, lane].tolist())
        assert values[bucket, :, lane].tolist() == np.float32(levels_by_codes(one, bits)).tolist()


def test_of_paths_that_are_as_close_that_of_the_lower_branches_is_taken() -> None:
    """Levels have equal distances from 0: in the middle between two of a subset the lower one counts."""
    codes = codes_of(np.zeros((1, 2 * ROW), np.float32), 2).reshape(2, ROW)
    # Of the first row's levels those next to 0 are as close; then the nearest is in subsets 0 and 3 alike, of which
    # only subset 0 follows an even code. So the first code is the even one.
    assert set(codes[0].tolist()) == {2}
    assert set(codes[1].tolist()) == {2 * 1 + 0}


@every_width
def test_a_bucket_has_the_codes_that_it_has_alone(bits: int) -> None:
    z = heavy_tailed(bits, 5, TILE)
    units = np.float32([1, 2, 0.5, 100, 1])
    together = codes_of(z, bits, units)
    for row in range(5):
        assert np.array_equal(codes_of(z[row : row + 1], bits, units[row : row + 1])[0], together[row])


@every_width
def test_levels_are_the_means_of_what_they_stand_for(bits: int) -> None:
    """Where Lloyd's iteration ends. A mean is within 6 standard errors (2e-9), and 0.003, as far as it was run."""
    z = gaussian(100 + bits, part(1000), TILE)
    values = values_of(codes_of(z, bits), bits)[:, ROW:].reshape(-1)
    z = z[:, ROW:].reshape(-1)
    levels = np.array(trellis.ascending(trellis.LEVELS[bits]), np.float32)
    places = np.searchsorted(levels, values)
    assert np.array_equal(levels[places], values)
    counts = np.bincount(places)
    sums, squares = (np.bincount(places, z.astype(np.float64) ** power) for power in (1, 2))
    means = sums / counts
    errors = np.sqrt((squares / counts - means**2) / counts)
    assert (np.abs(means - levels) < 6 * errors + 0.003).all()


@every_width
def test_the_error_is_less_than_without_a_trellis(bits: int) -> None:
    """Its mean over buckets is within 6 standard errors (2e-9) of the table, and half of its last digit."""
    z = gaussian(200 + bits, part(1000), TILE)
    errors = ((z - values_of(codes_of(z, bits), bits)) ** 2).mean(axis=1)
    expected = trellis.DISTORTIONS[bits]
    digit = 10.0 ** -len(str(expected).split(".")[1])
    assert abs(errors.mean() - expected) < 6 * errors.std() / len(z) ** 0.5 + digit / 2
    assert expected < 0.9 * rotation.DISTORTIONS[bits]


@every_width
def test_the_shortest_bucket_has_the_error_of_lloyd_max_levels(bits: int) -> None:
    """It is a first row alone: its codes are the places of the nearest levels."""
    z = gaussian(300 + bits, 50, ROW)
    levels = np.array(trellis.ascending(rotation.LEVELS[bits]))
    nearest = np.abs(z[..., None] - levels).argmin(axis=2)
    assert np.array_equal(codes_of(z, bits), nearest)
