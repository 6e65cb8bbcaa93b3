"""Whole exchanges with TensorFlow's kernels have the reference's bits.

With ``--all`` they take minutes, which another process than that of `test_tf_kernels` can spend.
"""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

from conformance.exchanges import ON_DEVICES, assert_exchanges_conform  # noqa: E402
from conformance.tensorflow_backend import WAYS, TensorFlow  # noqa: E402
from helpers import extended  # noqa: E402

TRACED = "nuqsgd-inf-alltoall global-l2 exponential-max eden binsgdm natural hierarchical-qsgd".split()
"""Exchanges that are traced by default; the others run eagerly, which takes less time."""


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (way, name) if way == ("function" if name in TRACED else "eager") else extended(way, name)
        for name in ON_DEVICES
        for way in WAYS
    ],
)
def test_whole_exchanges(way: str, name: str) -> None:
    assert_exchanges_conform(TensorFlow(way), name, decoding=1)
