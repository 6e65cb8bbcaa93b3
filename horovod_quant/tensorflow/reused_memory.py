"""Memory that a step's arrays reuse from an earlier step.

The operating system would clear new pages each time, which takes longer than the kernels.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable

import numpy as np

from horovod_quant.kernels.arrays import aligned, memory_for

_REFERENCES_OF_UNUSED = 2
"""References to an unused element in ``sys.getrefcount``: the list's and the argument's."""

_MOST_KEPT = 4
"""Maximum arrays per key. Two alternate; TensorFlow may release one a step late, or a user may keep one."""


class ReusedMemory:
    """Allocator of float32 arrays that reuses unreferenced memory.

    TensorFlow's references count, too.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[int, list[np.ndarray]]] = {}
        self._lock = threading.Lock()

    def take(self, key: Hashable, elements: int) -> np.ndarray:
        """Return an uninitialized flat array; each ``key`` has separate memory."""
        with self._lock:
            size, memories = self._kept.get(key, (elements, []))
            if size != elements:
                memories = []
            self._kept[key] = elements, memories
            for i in range(len(memories)):
                if sys.getrefcount(memories[i]) == _REFERENCES_OF_UNUSED:
                    return aligned(memories[i], elements, np.float32)
            memory = memory_for(elements, np.float32)
            if len(memories) < _MOST_KEPT:
                memories.append(memory)
            return aligned(memory, elements, np.float32)
