"""Expected errors are what the simulator finds, for gradients like white noise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from horovod_quant import simulator
from horovod_quant.frontends import methods
from horovod_quant.schemes import NUQSGD, QSGD, BinSGDM, GlobalQSGD, Hierarchical


@pytest.mark.parametrize("rounding", ["correlated", "independent"])
@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize(
    "name",
    ["qsgd-8", "qsgd-4", "qsgd-2", "qsgd-4-l2-bucket1024-allgather", "qsgd-8-l2", "nuqsgd-8", "nuqsgd-4", "nuqsgd-2",
     "global-qsgd-8",
     "global-qsgd-5", "global-qsgd-8-l2", "global-qsgd-4-exponential", "qsgd-4-alltoall", "nuqsgd-8-alltoall"],
)  # fmt: skip
def test_errors_are_those_of_the_simulator(name: str, workers: int, rounding: str) -> None:
    scheme = dataclasses.replace(methods.parse(name).scheme(), rounding=rounding)
    gradients = np.random.default_rng(1).standard_normal((workers, 32 * 1024))
    simulated = simulator.run(scheme, gradients).nmse
    assert scheme.expected_nmse(workers, workers) == pytest.approx(simulated, rel=0.1)
    assert scheme.relative_error(workers, workers) == scheme.expected_nmse(workers, workers) ** 0.5


@pytest.mark.parametrize("workers", [4, 16])
@pytest.mark.parametrize("bits", [3, 4])
def test_a_reducer_rounds_small_averages_to_the_workers_levels(bits: int, workers: int) -> None:
    scheme = GlobalQSGD(bits, levels="exponential")
    gradients = np.random.default_rng(1).standard_normal((workers, 32 * 1024))
    simulated = simulator.run(scheme, gradients).nmse
    assert scheme.expected_nmse(workers, workers) == pytest.approx(simulated, rel=0.15)


def test_the_error_is_that_of_the_exchange_that_the_workers_run() -> None:
    for scheme in (QSGD(), NUQSGD()):
        few, many = scheme.expected_nmse(4, 4), scheme.expected_nmse(8, 8)
        assert few == dataclasses.replace(scheme, exchange="allgather").expected_nmse(4, 4) < many
        gradients = np.random.default_rng(1).standard_normal((8, 32 * 1024))
        assert many == pytest.approx(simulator.run(scheme, gradients).nmse, rel=0.1)


def test_levels_by_hand() -> None:
    """shared/ALGORITHMS.md: (2^(bits-1) - 1) // n; 64 workers on 8 hosts at 8 bits have 15, not 1."""
    assert GlobalQSGD(8).levels_left(4, 4) == 31
    assert GlobalQSGD(8).levels_left(64, 8) == 1
    assert Hierarchical(GlobalQSGD(8)).levels_left(64, 8) == 15
    assert [methods.parse(name).scheme().levels_left(9, 9) for name in ("qsgd-4", "nuqsgd-4")] == [7, 7]
    assert BinSGDM().levels_left(4, 4) is None
    assert BinSGDM().relative_error(4, 4) is None


def test_fewer_workers_in_the_sum_mean_less_error() -> None:
    flat, hierarchical = GlobalQSGD(8), Hierarchical(GlobalQSGD(8))
    errors = [scheme.relative_error(64, 8) for scheme in (flat, hierarchical)]
    assert errors[0] > 5 * errors[1]
