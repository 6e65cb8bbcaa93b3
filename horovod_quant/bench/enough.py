"""Stopping rule of ``--rounds auto``."""

from __future__ import annotations

import math

import numpy as np

FEWEST, MOST = 6, 200
"""Limits of the number of rounds. With fewer, the range has less than 95% probability of the true median."""

PRECISION = 0.02
"""Maximum relative distance from a ratio's median to its interval's ends."""

LONGEST = 300.0
"""Maximum seconds of measured step communication."""


def is_enough(wall: np.ndarray, reference: int) -> bool:
    """True if the ratios are precise enough; the same on all workers.

    Args:
        wall: seconds of the slowest worker, ``[round, trial]``.
        reference: the trial with which the others are compared in each round.
    """
    rounds = len(wall)
    if rounds < FEWEST:
        return False
    if rounds >= MOST or wall.sum() >= LONGEST:
        return True
    ratios = wall[:, [reference]] / wall
    lowest, median, highest = interval(ratios)
    return bool(((highest - lowest) / 2 <= PRECISION * median).all())


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return columns' medians between the ends of 95% confidence intervals.

    The interval follows from order statistics, for any distribution. If a caller checks after each round, and stops at
    the first interval that is short enough, the confidence is somewhat lower.
    """
    ordered, count = np.sort(values, axis=0), len(values)
    skipped = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return ordered[skipped], np.median(ordered, axis=0), ordered[count - 1 - skipped]
