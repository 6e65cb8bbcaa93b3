"""Address sets, to detect dependences between computations."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Ranges:
    """A union of half-open intervals."""

    def __init__(self) -> None:
        self._lows: list[int] = []
        self._highs: list[int] = []

    def add(self, low: int, high: int) -> None:
        """Add ``low .. high - 1``, and merge intervals that meet."""
        first, last = bisect_left(self._highs, low), bisect_right(self._lows, high)
        if first < last:
            low, high = min(low, self._lows[first]), max(high, self._highs[last - 1])
        self._lows[first:last] = [low]
        self._highs[first:last] = [high]

    def meets(self, low: int, high: int) -> bool:
        """True if it contains a number of ``low .. high - 1``."""
        at = bisect_right(self._highs, low)
        return at < len(self._lows) and self._lows[at] < high
