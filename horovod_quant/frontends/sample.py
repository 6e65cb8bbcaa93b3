"""Sample of a gradient for measuring the nmse.

See ``nmse_every`` of the compressors.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from horovod_quant.kernels.layout import TILE, ceil_div

REMEMBERED = 16
"""Maximum number of measurements: older ones do not describe the present gradients."""


def sampled(name: str, number: int, elements: int, share: float) -> np.ndarray:
    """Return sampled indices, in whole blocks, the same on every worker.

    Args:
        name: name of the gradient.
        number: number of the draw, which selects the blocks.
        elements: number of elements of the gradient, 1 or more.
        share: share of the elements to draw, from 0 to 1; at least one block.
    """
    blocks = ceil_div(elements, TILE)
    count = min(blocks, max(1, round(share * blocks)))
    chosen = sorted(random.Random(f"{name} {number}").sample(range(blocks), count))
    indices = (np.array(chosen)[:, None] * TILE + np.arange(TILE)).reshape(-1)
    return indices[indices < elements]


class BaseSampler:
    """Measurement of the nmse of reductions, without a framework's part.

    Args:
        every: steps from one measurement to the next; 0 for none.
        share: the share of a gradient's elements to compare, from 0 to 1; at least one block.
    """

    def __init__(self, every: int, share: float) -> None:
        self.every, self.share = every, share
        self._errors: dict[str, deque[tuple[float, float]]] = {}

    def __bool__(self) -> bool:
        """True if it measures."""
        return self.every > 0

    @property
    def nmse(self) -> float | None:
        """Mean nmse of the latest measurements; None before the first."""
        found = [pair for pairs in list(self._errors.values()) for pair in list(pairs)]
        squares = sum(square for _, square in found)
        return sum(error for error, _ in found) / squares if squares else None

    def _record(self, name: str, error: float, square: float) -> None:
        """Record the squared norms of an error and of what is exact.

        Each name has its own latest measurements.
        """
        self._errors.setdefault(name, deque(maxlen=REMEMBERED)).append((error, square))
