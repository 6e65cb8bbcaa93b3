"""Sample of a gradient for measuring the nmse.

See ``nmse_every`` of the compressors.
"""

from __future__ import annotations

import random

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
