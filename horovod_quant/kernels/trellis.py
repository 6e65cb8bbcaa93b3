"""Trellis-coded quantization in numpy: the specification.

Source: Marcellin and Fischer, IEEE Trans. Communications, 1990. A code of b bits chooses one of ``2^(b + 1)`` levels,
2× the number of codes: the two codes before it select the half. The encoder searches for the sequence of codes with the
smallest sum of squared errors, which is 10% to 30% less than that of Lloyd-Max levels with the same number of bits.

A bucket's coordinates are rows of 32; lane i of all rows is a separate sequence, from the first row to the last.

1. *Subsets*: levels in ascending order belong to subsets 0, 1, 2, 3, 0, 1, ... A code is ``2 p + b``: b its *branch*, a
   bit, and p the index of its level in the subset ``b' + 2 (b xor b'')``, where b' and b'' are the branches of the code
   before and of the one before that (Ungerboeck's code of four states, which are b and b').
2. *The first row* has no codes before it: its levels are the Lloyd-Max levels of b bits in ascending order, and a code
   is the level's index. So b'' is 0 in the second row.
3. *Distances*: in each subset the nearest level counts; in the middle between two it is the lower one. Middles and
   levels are multiplied by the bucket's unit, the distance is the square of the difference.
4. *Path*: each state has the least sum of distances of all sequences that end there; of equal sums the one with
   b'' = 0. The sequence ends in the state with the least sum, of equal ones in the one with the least ``b + 2 b'``.

All operations are in float32, in this order, so that all backends find the same path.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from horovod_quant.kernels.layout import ROW

LEVELS: dict[int, tuple[float, ...]] = {
    1: (0.3965216, 1.1846127),
    2: (0.1745822, 0.6357927, 1.0658745, 1.8668883),
    3: (0.0934709, 0.3200105, 0.5210609, 0.7691846, 1.0189391, 1.3346746, 1.7585782, 2.4517541),
    4: (
        *(0.0402142, 0.1579808, 0.2418479, 0.3609421, 0.4527030, 0.5760727, 0.6802912, 0.8124041),
        *(0.9361862, 1.0869171, 1.2436125, 1.4360499, 1.6670287, 1.9652344, 2.3640281, 2.9742886),
    ),
}
"""Positive levels by bits, from Lloyd's iteration; the others are their negatives."""

DISTORTIONS = {1: 0.3256, 2: 0.0915, 3: 0.02506, 4: 0.00665}
"""Mean squared error of a whole bucket's standard normal coordinates."""

FAR = np.float32(2.0**120)
"""Sum of distances of an impossible state."""

BRANCHES = ((0, 0, 2), (0, 2, 0), (1, 1, 3), (1, 3, 1))
"""Branch b' of states ``b + 2 b'``; subsets of codes leading there, by b''."""


def ascending(positive: Sequence[float]) -> list[float]:
    """Return levels and their negatives in ascending order."""
    return [*(-level for level in reversed(positive)), *positive]


def middles(levels: Sequence[float], subsets: int) -> list[float]:
    """Return the middle between each level and the subset's next one."""
    return [(low + high) / 2 for low, high in zip(levels, levels[subsets:])]


def trellis_codes(z: np.ndarray, units: np.ndarray, bits: int, first_levels: Sequence[float]) -> np.ndarray:
    """Return the codes of buckets' coordinates.

    Args:
        z: float32 ``[buckets, coordinates]``.
        units: float32 ``[buckets]``, the standard deviation of each bucket's coordinates.
        first_levels: positive Lloyd-Max levels.

    Returns:
        uint32, of z's shape.
    """
    rows = np.moveaxis(z.reshape(len(z), -1, ROW), 1, 0)
    levels = ascending(LEVELS[bits])
    nearest, sums = _nearest(rows[0], units, ascending(first_levels), 2)
    sums += [np.full_like(sums[0], FAR)] * 2
    indices, decisions = [nearest], []
    for row in rows[1:]:
        nearest, distances = _nearest(row, units, levels, 4)
        indices.append(nearest)
        pairs = []
        for before, one, two in BRANCHES:
            pairs.append((sums[before] + distances[one], sums[before + 2] + distances[two]))
        decisions.append(np.array([high < low for low, high in pairs]))
        sums = [np.where(high < low, high, low) for low, high in pairs]

    state = np.argmin(np.array(sums), axis=0)
    branch, before = state & 1, state >> 1
    codes = np.zeros(rows.shape, np.uint32)
    for number in range(len(rows) - 1, 0, -1):
        earlier = np.take_along_axis(decisions[number - 1], (branch + 2 * before)[None], 0)[0].astype(
            np.int64
        )
        subset = before + 2 * (branch ^ earlier)
        codes[number] = 2 * np.take_along_axis(indices[number], subset[None], 0)[0] + branch
        branch, before = before, earlier
    codes[0] = 2 * np.take_along_axis(indices[0], branch[None], 0)[0] + branch
    return np.moveaxis(codes, 0, 1).reshape(z.shape)


def trellis_values(codes: np.ndarray, bits: int, first_levels: Sequence[float]) -> np.ndarray:
    """Return the levels of buckets' codes, float32, in the same shape."""
    rows = codes.reshape(len(codes), -1, ROW).astype(np.int64)
    branches = rows & 1
    values = np.empty(rows.shape, np.float32)
    values[:, 0] = np.array(ascending(first_levels), np.float32)[rows[:, 0]]
    before = branches[:, :-1]
    earlier = np.concatenate([np.zeros_like(before[:, :1]), before[:, :-1]], axis=1)[:, : before.shape[1]]
    indices = 4 * (rows[:, 1:] >> 1) + before + 2 * (branches[:, 1:] ^ earlier)
    values[:, 1:] = np.array(ascending(LEVELS[bits]), np.float32)[indices]
    return values.reshape(codes.shape)


def _nearest(
    row: np.ndarray, units: np.ndarray, levels: Sequence[float], subsets: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the nearest level's index and distance in each subset."""
    scaled = np.array(levels, np.float32)[:, None] * units
    between = np.array(middles(levels, subsets), np.float32)[:, None] * units
    indices, distances = [], []
    for subset in range(subsets):
        index = np.zeros(row.shape, np.int64)
        for middle in between[subset::subsets]:
            index += row > middle[:, None]
        difference = row - np.take_along_axis(scaled[subset::subsets].T, index, 1)
        indices.append(index)
        distances.append(difference * difference)
    return np.array(indices), distances
