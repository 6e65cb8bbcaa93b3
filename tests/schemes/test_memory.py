"""Memory that an exchange takes besides the gradient, with the native kernels."""

from __future__ import annotations

import functools
import tracemalloc
from typing import Any

import numpy as np
import pytest

from horovod_quant import kernels, schemes, simulator
from horovod_quant.kernels.keys import RngKey
from horovod_quant.schemes.base import Allgather, Allreduce, BinaryState, Gradient, Workers, split_gathered

ELEMENTS = 4_000_000


def answered_alone(request: Any) -> Any:
    """What a collective answers to a single worker, without a copy."""
    if isinstance(request, Allreduce):
        return request.array
    return split_gathered(request.array, request) if isinstance(request, Allgather) else [request.array]


@pytest.mark.parametrize(
    "scheme",
    [
        schemes.GlobalQSGD(4),
        schemes.GlobalQSGD(4, "l2"),
        schemes.GlobalQSGD(4, levels="exponential"),
        schemes.GlobalQSGD(4, rotate=True),
        schemes.QSGD(4),
        schemes.NUQSGD(4),
        schemes.QSGD(4, coding="elias"),
        schemes.NUQSGD(4, coding="elias"),
        schemes.QSGD(2, coding="elias-omega"),
        schemes.EDEN(3),
        schemes.BinSGDM(),
        schemes.BinSGDM(server_bits=3),
    ],
    ids=str,
)
def test_own_buffers_stay_below_0_3_of_the_gradient(scheme: Any) -> None:
    values = np.random.default_rng(0).standard_normal(ELEMENTS).astype(np.float32)
    out = np.zeros_like(values)
    state = BinaryState(np.zeros_like(values), np.zeros_like(values), 0.9)
    backend = kernels.get("native")
    tracemalloc.start()
    try:
        exchange = scheme.begin([Gradient(values, RngKey(0, "w"), 0, state)], Workers(0, 1), backend)
        answer, finished = None, None
        while finished is None:
            try:
                answer = answered_alone(exchange.send(answer))
            except StopIteration as stop:
                finished = stop.value
        finished.write(0, 1.0, out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.any(out)
    assert peak < 0.3 * values.nbytes, f"{peak / values.nbytes:.2f}"


@pytest.mark.parametrize(
    ("make", "custom_reduction"),
    [
        (functools.partial(schemes.QSGD, norm="l2"), False),
        (functools.partial(schemes.QSGD, norm="max"), False),
        (functools.partial(schemes.QSGD, exchange="alltoall"), False),
        (functools.partial(schemes.QSGD, norm="l2", coding="elias"), False),
        (schemes.NUQSGD, False),
        (schemes.GlobalQSGD, False),
        (functools.partial(schemes.GlobalQSGD, norm="l2"), False),
        (functools.partial(schemes.GlobalQSGD, levels="exponential"), False),
        (functools.partial(schemes.GlobalQSGD, levels="exponential"), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["numpy", "native"])
def test_a_bucket_that_is_not_full_takes_no_memory_for_the_rest(
    make: Any, custom_reduction: bool, backend: str
) -> None:
    gradients = list(np.random.default_rng(2).standard_normal((2, 2000)).astype(np.float32))
    run = functools.partial(
        simulator.run, gradients=gradients, kernels=backend, custom_reduction=custom_reduction
    )
    expected = run(make(bucket_size=2048))
    tracemalloc.start()
    try:
        result = run(make(bucket_size=2**26))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * gradients[0].nbytes, peak
    assert np.array_equal(result.decoded[0][0].view(np.uint32), expected.decoded[0][0].view(np.uint32))


@pytest.mark.parametrize("name", ["QSGD", "NUQSGD"])
def test_elias_coding_never_takes_more_than_the_packed_codes(name: str) -> None:
    """8 bits of a Gaussian gradient have longer Elias codes; then the packed codes are sent."""
    gradients = list(np.random.default_rng(1).standard_normal((2, 100_000)).astype(np.float32))
    fixed, elias = (
        simulator.run(getattr(schemes, name)(8, "max", coding=coding), gradients)
        for coding in ("fixed", "elias")
    )
    assert np.array_equal(fixed.decoded[0][0], elias.decoded[0][0])
    assert elias.bytes_sent["allgather"] <= fixed.bytes_sent["allgather"] + 16
    fewer = simulator.run(getattr(schemes, name)(2, "l2", coding="elias"), gradients)
    assert fewer.bytes_sent["allgather"] < 0.25 * fixed.bytes_sent["allgather"]


def test_the_measurement_sees_numpys_buffers() -> None:
    tracemalloc.start()
    try:
        np.zeros(ELEMENTS, np.float32)
        assert tracemalloc.get_traced_memory()[1] >= 4 * ELEMENTS
    finally:
        tracemalloc.stop()
