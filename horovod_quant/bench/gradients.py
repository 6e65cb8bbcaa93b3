"""Random gradients, and their exact average."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from horovod_quant.analysis.models import Shapes

SCALE = np.float32(0.01)
"""Standard deviation of the gradients' normally distributed elements."""


def gradient(shape: tuple[int, ...], seed: int, rank: int, index: int) -> np.ndarray:
    """Return a worker's gradient of the model's parameter number ``index``, float32."""
    generator = np.random.default_rng([seed, rank, index])
    return SCALE * generator.standard_normal(shape, np.float32)


class ExactAverage:
    """Exact average in float64 for comparison.

    Every worker compares a share of the parameters.

    Args:
        shapes: the shapes of the gradients.
        seed: the seed of `gradient`.
        rank, size: this worker's rank, and the number of workers.
    """

    def __init__(self, shapes: Shapes, seed: int, rank: int, size: int) -> None:
        self._exact = {}
        for index, shape in enumerate(shapes.values()):
            if index % size == rank:
                total = np.zeros(shape)
                for worker in range(size):
                    total += gradient(shape, seed, worker, index)
                self._exact[index] = total / size

    def squares(self, averages: Sequence[np.ndarray]) -> tuple[float, float]:
        """Return sums of squares of errors and of exact averages.

        They are for this worker's share of the parameters.
        """
        errors = sum(float(np.square(averages[index] - exact).sum()) for index, exact in self._exact.items())
        return errors, sum(float(np.square(exact).sum()) for exact in self._exact.values())
