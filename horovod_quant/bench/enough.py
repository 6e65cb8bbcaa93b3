"""When ``--rounds auto`` has measured enough."""

from __future__ import annotations

import math

import numpy as np

FEWEST, MOST = 6, 200
"""Rounds. Of fewer, the range does not contain the true median with 95%."""

PRECISION = 0.02
"""What every ratio's interval may extend to either side of its median, relative to it."""

LONGEST = 300.0
"""Seconds of measured exchanges."""


def is_enough(wall: np.ndarray, reference: int) -> bool:
    """Whether every method's ratio to another is known well; the same on all workers, whose times are all in here.

    Args:
        wall: seconds, ``[round, trial]``.
        reference: the trial that the others are compared with in each round.
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
    """The median of each column of a sample, between the ends of an interval that has the true one with about 95%.

    By the order of the values, whatever their distribution is. Who looks after each round, and stops at the first
    interval that is short enough, has somewhat less.
    """
    ordered, count = np.sort(values, axis=0), len(values)
    skipped = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return ordered[skipped], np.median(ordered, axis=0), ordered[count - 1 - skipped]
