"""Where a gradient is, for kernels that want no more than that."""

from __future__ import annotations

from typing import Any, Callable, final

import numpy as np


@final
class BufferView:
    """Where the elements of a flat array are, which belongs to somebody else, such as another framework's tensor.

    To make numpy's view of a tensor takes several times as long as to ask for its address, which is all that kernels
    for many segments want. Whoever wants more gets the array, which is made then.

    Args:
        dtype: of the elements.
        length: how many there are.
        view: makes the array from their owner.
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
        """Itself, of the elements that begin there, which can be written.

        Args:
            address: of the first element.
            owner: of the elements.
            memory: what they are in, which may outlive its belonging to the owner: it is kept.
        """
        self.address, self._owner, self._memory, self._array = address, owner, memory, None
        return self

    def let_go(self) -> None:
        """Of the owner and the memory."""
        self._owner = self._memory = self._array = None

    def array(self) -> np.ndarray:
        if self._array is None:
            self._array = self._view(self._owner)
        return self._array

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> BufferView:
        """Consecutive elements; itself, if those are all."""
        start, stop, step = part.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"{part}: a span is of consecutive elements")
        if stop - start == self.shape[0]:
            return self
        found = BufferView(self.dtype, max(stop - start, 0), lambda whole: whole.array()[start:stop])
        return found.at(self.address + start * self.dtype.itemsize, self, self._memory)


def as_array(values: Any) -> Any:
    """The array, if it is a `BufferView`."""
    return values.array() if type(values) is BufferView else values
