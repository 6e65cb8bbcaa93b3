"""Clipping of a gradient by its L2 norm."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_quant.kernels.layout import TILE
from horovod_quant.kernels.sums import in_a_tree


def clip(kernels: Any, x: np.ndarray, most: float) -> np.ndarray:
    """Scale ``x`` down to an L2 norm of at most ``most``.

    Returns float32 if the norm exceeds it, else ``x``. The tiles' square sums are added in a tree, so that all backends
    are bit-identical. A gradient whose norm is not finite is returned unchanged.
    """
    sums = kernels.bucket_square_sums(x, TILE)
    if not len(sums):
        return x
    norm = kernels.norms_of_square_sums(in_a_tree(sums))[0]
    if not np.float32(most) < norm < np.inf:
        return x
    values = kernels.to_float32(x, np.empty(len(x), np.float32))
    return kernels.scale([values], float(np.float32(most) / norm), values)
