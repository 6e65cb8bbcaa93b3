"""Schemes take a `Span` for a gradient's elements, and for where its result goes, as they take arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import SCHEMES, same_bits

from horovod_quant import simulator
from horovod_quant.kernels import native
from horovod_quant.kernels.arrays import Span, address, as_array
from horovod_quant.kernels.keys import KeyChain
from horovod_quant.schemes.base import BinaryState, Gradient, Workers

WORKERS = 2
LENGTHS = [70, 1024, 5000, 1, 3333]


def as_span(array: np.ndarray) -> Span:
    return Span(array.dtype, len(array), np.asarray).at(address(array), array, array)


def as_it_is(array: np.ndarray) -> np.ndarray:
    return array


def exchanged(scheme: Any, given_as: Any, broken: bool) -> list[np.ndarray]:
    """Every worker's results, decoded all at once where the scheme does that, else one by one."""
    generator = np.random.default_rng(7)
    exchanges = []
    for rank in range(WORKERS):
        own = [generator.standard_normal(length).astype(np.float32) for length in LENGTHS]
        if broken and rank == 1:
            own[2][1500] = np.nan
        states = [BinaryState(0.1 * x, np.abs(x) + 0.5, 0.9) for x in own]
        gradients = [
            Gradient(given_as(x), KeyChain(3, f"w{i}"), 5, states[i] if scheme.own_optimizer else None)
            for i, x in enumerate(own)
        ]
        workers = Workers(rank, WORKERS)
        exchanges.append(scheme.for_workers(workers).begin(gradients, workers, native))
    answers: list[Any] = [None] * WORKERS
    decoded: list[Any] = []
    while not decoded:
        requests = []
        for exchange, answer in zip(exchanges, answers):
            try:
                requests.append(exchange.send(answer))
            except StopIteration as stop:
                decoded.append(stop.value)
        if requests:
            answers = simulator._answers(requests, 1, None)
    results = []
    for each in decoded:
        outs = [np.zeros(length, np.float32) for length in LENGTHS]
        if each.write_all is not None:
            each.write_all(0.5, [given_as(out) for out in outs])
        else:
            for i, out in enumerate(outs):
                each.write(i, 0.5, as_array(given_as(out)))
        results += outs
    return results


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_places_have_the_bits_of_arrays(scheme: Any, broken: bool) -> None:
    expected, found = exchanged(scheme, as_it_is, broken), exchanged(scheme, as_span, broken)
    assert all(map(same_bits, found, expected))
    assert len(found) == WORKERS * len(LENGTHS)
    assert any(np.isnan(each).any() for each in found) == broken
    assert all(each.any() for each in found)
