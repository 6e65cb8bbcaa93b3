"""Memory that a step's arrays take over from those of an earlier step: new pages would have to be cleared each time,
which takes longer than the kernels.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable

import numpy as np

from horovod_quant.kernels.arrays import aligned, memory_for

_REFERENCES_OF_UNUSED = 2
"""To an element of a list, in a call of ``sys.getrefcount``: the list's and the argument's."""

_MOST_KEPT = 4
"""Memories of a place. Two take turns; TensorFlow may let go of an array a step late, or a user hold one."""


class ReusedMemory:
    """Gives float32 arrays; the memory of one is given again when nothing, TensorFlow included, refers to it."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[int, list[np.ndarray]]] = {}
        self._lock = threading.Lock()

    def take(self, place: Hashable, elements: int) -> np.ndarray:
        """A flat array with any values, in memory that serves no other place."""
        with self._lock:
            size, memories = self._kept.get(place, (elements, []))
            if size != elements:
                memories = []
            self._kept[place] = elements, memories
            for i in range(len(memories)):
                if sys.getrefcount(memories[i]) == _REFERENCES_OF_UNUSED:
                    return aligned(memories[i], elements, np.float32)
            memory = memory_for(elements, np.float32)
            if len(memories) < _MOST_KEPT:
                memories.append(memory)
            return aligned(memory, elements, np.float32)
