"""The variance of a scheme's rounding: as its kernels have it, and exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_quant import simulator
from horovod_quant.analysis import bounds
from horovod_quant.schemes import NUQSGD


def squared(arrays: Sequence[np.ndarray]) -> float:
    """Sum of all squares, in float64."""
    return float(sum(np.sum(np.square(a, dtype=np.float64)) for a in arrays))


def measured(scheme: Any, gradients: Sequence[np.ndarray], seed: int) -> float:
    """``||Q(g) - g||^2 / ||g||^2`` of one rounding by the kernels, all gradients of a worker taken as one vector."""
    done = simulator.run(scheme, [list(gradients)], seed=seed)
    differences = [q.astype(np.float64) - g for q, g in zip(done.decoded[0], gradients)]
    return squared(differences) / squared(gradients)


def expected(scheme: Any, gradients: Sequence[np.ndarray]) -> float:
    """The exact expectation of `measured` for QSGD and NUQSGD."""
    if isinstance(scheme, NUQSGD):
        levels = bounds.exponential_levels(2 ** (scheme.bits - 1) - 2)
    else:
        levels = bounds.uniform_levels(2 ** (scheme.bits - 1) - 1)
    total = 0.0
    for gradient in gradients:
        padded = np.zeros(-(-len(gradient) // scheme.bucket_size) * scheme.bucket_size)
        padded[: len(gradient)] = np.abs(gradient)
        rows = padded.reshape(-1, scheme.bucket_size)
        norms = rows.max(axis=1) if scheme.norm == "max" else np.sqrt(np.square(rows).sum(axis=1))
        rows, norms = rows[norms > 0], norms[norms > 0]
        ratios = np.minimum(rows / norms[:, None], 1)
        total += float(norms**2 @ bounds.rounding_variance(ratios, levels).sum(axis=1))
    return total / squared(gradients)
