"""Schemes take a `BufferView` for a gradient's elements, its state, and where its result goes, as they take arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import SCHEMES, lockstep, same_bits, used_states

from horovod_quant.kernels import native
from horovod_quant.kernels.arrays import address
from horovod_quant.kernels.buffer_view import BufferView
from horovod_quant.schemes.base import Workers

WORKERS = 2
LENGTHS = [70, 1024, 5000, 3, 3333]


def as_span(array: np.ndarray) -> BufferView:
    return BufferView(array.dtype, len(array), np.asarray).at(address(array), array, array)


def as_it_is(array: np.ndarray) -> np.ndarray:
    return array


def exchanged(scheme: Any, given_as: Any, broken: bool) -> list[np.ndarray]:
    """Every worker's results, and their states."""
    generator = np.random.default_rng(7)
    groups = [
        [generator.standard_normal(length).astype(np.float32) for length in LENGTHS] for _ in range(WORKERS)
    ]
    if broken:
        groups[1][2][1500] = np.nan
    given: Any = [list(map(given_as, own)) for own in groups]
    kept = list(map(used_states, groups))
    states = [
        [own._replace(momentum=given_as(own.momentum), scale=given_as(own.scale)) for own in each]
        for each in kept
    ]
    results = []
    for each in lockstep(scheme.for_workers(Workers(0, WORKERS)), given, states, kernels=native):
        outs = [np.zeros(length, np.float32) for length in LENGTHS]
        each.decode(range(len(outs)), 0.5, [given_as(out) for out in outs])
        results += outs
    return results + [array for each in kept for own in each for array in (own.momentum, own.scale)]


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_places_have_the_bits_of_arrays(scheme: Any, broken: bool) -> None:
    expected, found = exchanged(scheme, as_it_is, broken), exchanged(scheme, as_span, broken)
    assert all(map(same_bits, found, expected))
    assert len(found) == 3 * WORKERS * len(LENGTHS)
    assert any(np.isnan(each).any() for each in found) == broken
    assert all(each.any() for each in found)
