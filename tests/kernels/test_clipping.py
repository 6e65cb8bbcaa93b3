"""Clipping by the L2 norm: what it returns."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import gaussian

from horovod_quant.kernels import reference

LENGTHS = (1, 33, 1024, 1025, 5000, 70_001)


@pytest.mark.parametrize("count", LENGTHS)
def test_a_long_gradient_gets_the_norm_and_keeps_its_direction(count: int) -> None:
    x = 3 * gaussian(count, count)
    length = np.linalg.norm(x.astype(np.float64))
    clipped = reference.clip(x, float(length / 4))
    assert clipped.dtype == np.float32
    np.testing.assert_allclose(clipped, x / 4, rtol=1e-6)
    assert not np.shares_memory(clipped, x)


def test_what_is_short_enough_or_not_finite_stays() -> None:
    x = gaussian(1, 3000)
    assert reference.clip(x, float(np.linalg.norm(x)) * 1.001) is x
    for bad in (np.nan, np.inf, -np.inf):
        x[17] = bad
        assert reference.clip(x, 1e-3) is x
    empty = np.zeros(0, np.float32)
    assert reference.clip(empty, 1.0) is empty
    assert not reference.clip(np.zeros(2000, np.float32), 1.0).any()
