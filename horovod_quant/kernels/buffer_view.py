"""Address and length of a gradient's memory, without an array."""

from __future__ import annotations

from typing import Any, Callable, final

import numpy as np


@final
class BufferView:
    """Address of a flat array in another framework's memory.

    Creating a numpy view of a tensor takes several times longer than reading its address, which suffices for kernels
    for many segments. `array` creates the view on demand.

    Args:
        dtype: the elements' dtype.
        length: the number of elements.
        view: creates the array from its owner.
    """

    __slots__ = ("_array", "_memory", "_owner", "_view", "address", "dtype", "nbytes", "shape")

    address: int

    def __init__(self, dtype: Any, length: int, view: Callable[[Any], np.ndarray]) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = (length,)
        self.nbytes = length * self.dtype.itemsize
        self._view = view
        self._array: np.ndarray | None = None
        self._owner: Any = None
        self._memory: Any = None

    def at(self, address: int, owner: Any, memory: Any) -> BufferView:
        """Point to writable elements at an address, and return self.

        Args:
            address: the address of the first element.
            owner: the owner of the elements.
            memory: their storage, which the owner may replace; kept alive here.
        """
        self.address, self._owner, self._memory, self._array = address, owner, memory, None
        return self

    def release(self) -> None:
        """Release the owner and the memory."""
        self._owner = self._memory = self._array = None

    def array(self) -> np.ndarray:
        if self._array is None:
            self._array = self._view(self._owner)
        return self._array

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> BufferView:
        """Return a view of consecutive elements; self, if those are all."""
        start, stop, step = part.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"{part}: a BufferView has consecutive elements")
        if stop - start == self.shape[0]:
            return self
        found = BufferView(self.dtype, max(stop - start, 0), lambda whole: whole.array()[start:stop])
        return found.at(self.address + start * self.dtype.itemsize, self, self._memory)


def as_array(values: Any) -> Any:
    """Return the array of a `BufferView`; other values unchanged."""
    return values.array() if type(values) is BufferView else values
