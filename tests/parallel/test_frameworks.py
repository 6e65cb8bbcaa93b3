"""PyTorch and TensorFlow deliver the same bits for the same gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from frameworks_worker import METHODS, SHAPES, STEPS
from launching import horovodrun

pytestmark = pytest.mark.parallel


@pytest.mark.extended  # each agrees with the simulator, in whatever else the default tier has
@pytest.mark.parametrize("workers", [2, 3])
def test_the_frameworks_agree(workers: int, tmp_path: Path) -> None:
    for framework in ("torch", "tensorflow"):
        program = [sys.executable, Path(__file__).with_name("frameworks_worker.py"), framework, tmp_path]
        done = horovodrun("mpi", workers, program)
        assert done.returncode == 0, done.stdout[-3000:]
    with np.load(tmp_path / "torch-0.npz") as expected:
        assert len(expected) == len(METHODS) * STEPS * len(SHAPES)
        for framework in ("torch", "tensorflow"):
            for rank in range(workers):
                with np.load(tmp_path / f"{framework}-{rank}.npz") as found:
                    for key, values in expected.items():
                        assert np.array_equal(found[key], values), f"{framework}, rank {rank}: {key}"
