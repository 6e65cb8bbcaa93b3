"""Threads as a transport: the simulator's bits, and an end to all of them if one fails."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from helpers import heavy_tailed, owned_states, same_bits
from mean_signs import MeanSigns
from thread_transport import exchange

from horovod_quant import simulator
from horovod_quant.schemes import EDEN, QSGD, BinSGDM, GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import Allreduce, Scheme, Workers
from horovod_quant.schemes.hierarchical import inner_of

SCHEMES = [
    QSGD(),
    QSGD(coding="elias"),
    QSGD(exchange="alltoall"),
    EDEN(),
    EDEN(exchange="alltoall"),
    GlobalQSGD(),
    GlobalQSGD(levels="exponential"),
    BinSGDM(),
    MeanSigns(),
]
LENGTHS = (0, 1, 33, 1024, 5000, 20_000)


def groups_of(size: int) -> list[list[np.ndarray]]:
    return [[heavy_tailed(10 * rank + i, n) for i, n in enumerate(LENGTHS)] for rank in range(size)]


@pytest.mark.parametrize(("size", "local_size"), [(1, 1), (3, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("inner", SCHEMES, ids=str)
def test_threads_return_the_simulators_bits(inner: Scheme, size: int, local_size: int) -> None:
    scheme = inner if local_size == 1 else Hierarchical(inner)
    groups = groups_of(size)

    def states() -> list | None:
        if not isinstance(inner_of(scheme), BinSGDM):
            return None
        return [
            owned_states(scheme, own, Workers(rank, size, local_size=local_size))
            for rank, own in enumerate(groups)
        ]

    ours, theirs = states(), states()
    found = exchange(scheme, groups, local_size, ours)
    expected = simulator.run(scheme, groups, local_size=local_size, states=theirs).decoded
    for mine, other in zip(found, expected):
        assert all(same_bits(a, b) for a, b in zip(mine, other))
    for mine, other in zip(ours or [], theirs or []):
        assert all(same_bits(a.momentum, b.momentum) for a, b in zip(mine, other))


@pytest.mark.parametrize("broken", [0, 2])
def test_an_exception_of_one_worker_ends_all(broken: int) -> None:
    class Failing(QSGD):
        def begin(self, gradients, workers, kernels):
            decoded = yield from super().begin(gradients, workers, kernels)
            if workers.rank == broken:
                raise ZeroDivisionError("of this worker")
            return decoded

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="of this worker"):
        exchange(Failing(), groups_of(3))
    assert threading.active_count() == before


def test_workers_that_make_other_requests_are_an_error() -> None:
    class Longer(QSGD):
        def begin(self, gradients, workers, kernels):
            decoded = yield from super().begin(gradients, workers, kernels)
            if workers.rank == 1:
                yield Allreduce(np.zeros(1, np.float32), "sum", [4])
            return decoded

    with pytest.raises(RuntimeError, match="the workers' requests differ"):
        exchange(Longer(), groups_of(2))
