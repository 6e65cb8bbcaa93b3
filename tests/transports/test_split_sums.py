"""A sum in two alltoalls gives the bits of the allreduce, and sends the same bytes."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from horovod_quant import simulator
from horovod_quant.schemes.base import Scheme
from horovod_quant.schemes.global_qsgd import GlobalQSGD
from horovod_quant.schemes.qsgd import QSGD
from horovod_quant.transports.split_sums import group_of_sums, split_sums


@dataclass(frozen=True)
class Split(Scheme):
    inner: Scheme

    def begin(self, gradients: Any, workers: Any, kernels: Any) -> Any:
        return split_sums(self.inner.begin(gradients, workers, kernels), workers.size)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("elements", [1, 33, 5000])
@pytest.mark.parametrize(
    "scheme",
    [
        GlobalQSGD(8),
        GlobalQSGD(5, norm="l2"),
        GlobalQSGD(4, levels="exponential"),
        GlobalQSGD(5, rotate=True),
        QSGD(4),
    ],
    ids=str,
)
def test_same_bits_and_bytes(scheme: Scheme, elements: int, size: int) -> None:
    generator = np.random.default_rng(elements)
    gradients = [[generator.standard_normal(elements), generator.standard_normal(40)] for _ in range(size)]
    plain, split = (simulator.run(each, gradients, seed=3) for each in (scheme, Split(scheme)))
    for own in split.decoded:
        for expected, found in zip(plain.decoded[0], own):
            np.testing.assert_array_equal(found, expected, strict=True)
    assert sum(split.bytes_sent.values()) == pytest.approx(sum(plain.bytes_sent.values()))
    if group_of_sums(scheme):
        assert set(split.bytes_sent) - {"allreduce"} == {"alltoall"}
    else:
        assert split.bytes_sent == plain.bytes_sent


def test_only_sums_of_integers_are_split() -> None:
    assert group_of_sums(GlobalQSGD(8))
    assert group_of_sums(GlobalQSGD(8, norm="l2"))
    assert group_of_sums(GlobalQSGD(8, rotate=True))
    assert not group_of_sums(dataclasses.replace(GlobalQSGD(8), levels="exponential"))
    assert not group_of_sums(QSGD(4))
