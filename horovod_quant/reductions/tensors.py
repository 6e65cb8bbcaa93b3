"""Tensors of a group, and the result of their reduction."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from horovod_quant.kernels.buffer_view import BufferView, as_array
from horovod_quant.kernels.keys import RngKey
from horovod_quant.reductions.requests import Request


class BinaryState(NamedTuple):
    """BinSGDM's state of one gradient, for the elements given by `Scheme.owned`.

    Two float32 arrays, updated in place; kernels for many segments take a `BufferView` of each.
    """

    momentum: Any
    scale: Any
    beta: float


class TensorInfo(NamedTuple):
    """Properties of a gradient for decoding, equal on all workers."""

    keys: RngKey
    elements: int
    start: int = 0


class Gradient:
    """Tensor of a group: flat, read-only elements, source of keys, and state.

    It may be a part of a tensor, which begins at index ``start``; ``start`` selects the random bits. Schemes do not
    change it: see `replaced`.

    Attributes:
        buffer: the elements as given, an array or a `BufferView`; kernels for many segments need no more.
    """

    # Not a tuple: new objects for every gradient and step would start Python's garbage collector, which visits all
    # objects of a framework. The frontend for PyTorch reuses this one after a reduction.
    __slots__ = ("_info", "buffer", "keys", "start", "state", "step")

    def __init__(
        self,
        values: np.ndarray | BufferView,
        keys: RngKey,
        step: int = 0,
        state: BinaryState | None = None,
        start: int = 0,
    ) -> None:
        self.buffer = values
        self._info: TensorInfo | None = None
        self.keys = keys
        self.step = step
        self.state = state
        self.start = start

    def replaced(self, values: np.ndarray, start: int | None = None) -> Gradient:
        """Return the gradient with other elements, by default of the same number."""
        return Gradient(values, self.keys, self.step, self.state, self.start if start is None else start)

    @property
    def values(self) -> np.ndarray:
        return as_array(self.buffer)

    @property
    def elements(self) -> int:
        return self.buffer.shape[0]

    @property
    def info(self) -> TensorInfo:
        if self._info is None:
            self._info = TensorInfo(self.keys, self.elements, self.start)
        return self._info


class Decoded:
    """Result of a reduction.

    Args:
        active: number of workers that have contributed.
        write: ``write(i, factor, out)`` decodes the sum over the workers of gradient i of the group, times ``factor``,
            into a flat floating-point array, and returns it. Only for schemes without ``decode``.
        exchanged_again: number of resent buckets of each gradient; empty for none.
        decode: ``decode(indices, factor, outs)`` does so for several gradients, and returns a list. The ``outs`` may be
            `horovod_quant.kernels.buffer_view.BufferView`.
        received: the input of `Scheme.decode_received`, if the scheme has it.
    """

    def __init__(
        self,
        active: Any,
        write: Callable[[int, Any, Any], Any] | None = None,
        exchanged_again: Sequence[int] = (),
        *,
        decode: Callable[[Sequence[int], Any, Sequence[Any]], Sequence[Any]] | None = None,
        received: Sequence[Any] | None = None,
    ) -> None:
        if (write is None) == (decode is None):
            raise TypeError("Decoded: give either write or decode")
        self.active = active
        self.exchanged_again = exchanged_again
        self.received = received
        self.decode = _each_alone(write) if decode is None else decode  # type: ignore[arg-type]

    def write(self, i: int, factor: Any, out: Any) -> Any:
        """Decode the sum of one gradient, times ``factor``; return ``out``."""
        return self.decode([i], factor, [out])[0]


def _each_alone(write: Callable[[int, Any, Any], Any]) -> Callable[..., Sequence[Any]]:
    return lambda indices, factor, outs: [write(i, factor, as_array(out)) for i, out in zip(indices, outs)]


Exchange = Generator[Request, Any, Decoded]
