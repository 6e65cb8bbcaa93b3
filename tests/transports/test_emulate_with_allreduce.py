"""Gathers and alltoalls as sums give the same bits as gathers and alltoalls."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import OverAllreduce, lockstep

from horovod_quant.schemes import EDEN, NUQSGD, QSGD, BinSGDM, GlobalQSGD
from horovod_quant.schemes.base import BinaryState, Scheme, Workers
from horovod_quant.transports.emulate_with_allreduce import collectives_of_emulation

SCHEMES = [
    QSGD(4),
    QSGD(4, coding="elias"),
    QSGD(4, exchange="alltoall"),
    NUQSGD(3, coding="elias-omega"),
    GlobalQSGD(8),
    GlobalQSGD(4, levels="exponential"),
    EDEN(3, exchange="allgather"),
    EDEN(2, server_bits=4, exchange="alltoall"),
    BinSGDM(),
    BinSGDM(server_bits=3),
]
LENGTHS = (5000, 1, 1024)


def decoded_by(scheme: Scheme, size: int) -> list[list[np.ndarray]]:
    random = np.random.default_rng(3)
    gradients = [[random.standard_normal(n).astype(np.float32) for n in LENGTHS] for _ in range(size)]
    states = [
        [BinaryState(*np.zeros((2, length), np.float32), 0.9) for length in LENGTHS] for _ in range(size)
    ]
    return [
        [result.write(i, 1.0 / size, np.empty(length, np.float32)) for i, length in enumerate(LENGTHS)]
        for result in lockstep(scheme, gradients, states)
    ]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_same_bits_by_sums_alone(scheme: Scheme, size: int) -> None:
    by_sums = OverAllreduce(scheme)
    for own, other in zip(decoded_by(by_sums, size), decoded_by(scheme, size)):
        assert all(map(np.array_equal, own, other))
    assert by_sums.requests == collectives_of_emulation(scheme.for_workers(Workers(0, size)))
