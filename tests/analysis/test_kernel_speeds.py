"""Kernel speeds: arithmetic by hand, and that everything that a scheme needs is measured."""

from __future__ import annotations

import pytest
from modelling import METHODS, SPEEDS

from horovod_quant.analysis.cost_model import Setting, exchange_cost
from horovod_quant.analysis.kernel_speeds import KernelSpeeds, Speed, measure_kernels
from horovod_quant.analysis.models import MODELS
from horovod_quant.analysis.network import Network
from horovod_quant.analysis.work import Call, work_of
from horovod_quant.schemes import QSGD, BinSGDM, GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import Scheme

ELEMENTS = 2**20


def an_element(speeds: KernelSpeeds, scheme: Scheme, workers: int) -> float:
    """Seconds of all kernels of an exchange for an element."""
    return speeds.seconds(work_of(scheme, (ELEMENTS,), workers).calls) / ELEMENTS


def test_seconds_by_hand() -> None:
    assert an_element(SPEEDS, GlobalQSGD(8), 4) == pytest.approx(3e-9)
    assert an_element(SPEEDS, QSGD(4), 4) == pytest.approx(4.5e-9)  # decodes four workers' codes
    assert an_element(SPEEDS, BinSGDM(), 4) == pytest.approx(2e-9 + 2.5e-9 / 4)  # votes for a quarter


def test_a_kernel_that_was_not_measured_is_named() -> None:
    with pytest.raises(KeyError, match="encode_uniform_sum has not been measured"):
        an_element(KernelSpeeds({("bucket_maxima", 0): Speed(1e-9)}), GlobalQSGD(8), 2)


def test_a_kernel_takes_as_long_as_with_the_nearest_number_of_bits() -> None:
    speeds = {("encode_uniform_sum", bits): Speed(bits * 1e-9) for bits in (2, 4)}
    calls = [Call("encode_uniform_sum", bits, 1) for bits in (1, 2, 5)]
    assert KernelSpeeds(speeds).seconds(calls) == pytest.approx((2 + 2 + 4) * 1e-9)


def test_measured_kernels_serve_every_scheme() -> None:
    speeds = measure_kernels(METHODS.values(), seconds=0.1)
    for scheme in METHODS.values():
        for workers in (1, 2, 7):
            assert 0 < an_element(speeds, scheme, workers) < 2e-6 * workers
    assert min(speeds.half) > 0


def test_hierarchical_exchanges_are_measured_too() -> None:
    schemes = [Hierarchical(GlobalQSGD(8)), Hierarchical(BinSGDM()), Hierarchical(QSGD(4))]
    speeds = measure_kernels(schemes, seconds=0.1)
    for scheme in schemes:
        for hosts in (4, 16):
            assert exchange_cost(scheme, Setting(MODELS["tiny"], Network(hosts, 8), speeds)).kernels > 0
