"""Gathers and alltoalls as sums give the same bits as gathers and alltoalls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_quant import kernels, simulator
from horovod_quant.kernels.keys import KeyChain
from horovod_quant.schemes import NUQSGD, QSGD, BinSGDM, GlobalQSGD
from horovod_quant.schemes.base import Allreduce, BinaryState, Gradient, Workers
from horovod_quant.schemes.over_allreduce import collectives_over_allreduce, over_allreduce

SCHEMES = [
    QSGD(4),
    QSGD(4, coding="elias"),
    QSGD(4, through="alltoall"),
    NUQSGD(3, coding="elias-omega"),
    GlobalQSGD(8),
    GlobalQSGD(4, levels="exponential"),
    BinSGDM(),
]
LENGTHS = (5000, 1, 1024)


def states_of(size: int) -> list[list[BinaryState]]:
    return [[BinaryState(*np.zeros((2, length), np.float32), 0.9) for length in LENGTHS] for _ in range(size)]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_same_bits_by_sums_alone(scheme: Any, size: int) -> None:
    random = np.random.default_rng(3)
    gradients = [[random.standard_normal(n).astype(np.float32) for n in LENGTHS] for _ in range(size)]
    expected = simulator.run(scheme, gradients, step=5, states=states_of(size)).decoded

    states = states_of(size)
    exchanges = []
    for rank in range(size):
        own = [
            Gradient(array, KeyChain(0, str(i)), 5, states[rank][i])
            for i, array in enumerate(gradients[rank])
        ]
        workers = Workers(rank, size)
        exchanges.append(over_allreduce(scheme.exchange(own, workers, kernels.get()), workers))
    answers: list[Any] = [None] * size
    results: list[Any] = []
    rounds = 0
    while not results:
        requests = []
        for exchange, answer in zip(exchanges, answers):
            try:
                requests.append(exchange.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if requests:
            rounds += 1
            assert all(isinstance(request, Allreduce) for request in requests)
            stacked = np.stack([request.array for request in requests])
            total = stacked.max(0) if requests[0].op == "max" else stacked.sum(0, dtype=stacked.dtype)
            answers = [total.copy() for _ in requests]
    assert rounds == collectives_over_allreduce(scheme)
    for rank, decoded in enumerate(results):
        for i, length in enumerate(LENGTHS):
            out = decoded.write(i, 1.0 / size, np.empty(length, np.float32))
            assert np.array_equal(out, expected[rank][i])
