"""Rounding with random numbers, for tests of what is proved of it."""

from __future__ import annotations

import numpy as np


def round_to(r: np.ndarray, levels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    above = np.clip(np.searchsorted(levels, r, side="right"), 1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    return np.where(rng.random(r.shape) * (high - low) < r - low, high, low)
