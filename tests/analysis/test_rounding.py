"""Expected errors are what the simulator finds, for gradients like white noise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from horovod_quant import simulator
from horovod_quant.frontends import methods
from horovod_quant.schemes import BinSGDM, GlobalQSGD, Hierarchical


@pytest.mark.parametrize("rounding", ["joint", "independent"])
@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize(
    "name",
    ["qsgdinf-8", "qsgdinf-4", "qsgdinf-2", "qsgd-4", "nuqsgd-8", "nuqsgd-4", "nuqsgd-2", "global-qsgd-8",
     "global-qsgd-5", "global-qsgd-l2-8", "global-qsgd-exp-4", "qsgdinf-alltoall-4", "nuqsgd-alltoall-8"],
)  # fmt: skip
def test_errors_are_those_of_the_simulator(name: str, workers: int, rounding: str) -> None:
    scheme = dataclasses.replace(methods.parse(name).scheme(), rounding=rounding)
    gradients = np.random.default_rng(1).standard_normal((workers, 32 * 1024))
    simulated = np.sqrt(simulator.run(scheme, gradients).error)
    assert scheme.relative_error(workers, workers) == pytest.approx(simulated, rel=0.05)


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
