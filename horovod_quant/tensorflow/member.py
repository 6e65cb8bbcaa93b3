"""One gradient of a group that is exchanged together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from horovod_quant.kernels.keys import KeyChain
from horovod_quant.schemes.base import Scheme, Workers


class HeldState(NamedTuple):
    """A variable's state for BinSGDM: float32 variables or parts of them, the decay, the number of the update, and the
    norm to which the gradient is clipped.
    """

    momentum: Any
    scale: Any
    beta: float
    step: tf.Tensor
    clip_norm: float | None = None


class StatePart:
    """Some elements of a variable, flat, that are read and assigned like a variable of their own."""

    def __init__(self, variable: tf.Variable, start: int, stop: int) -> None:
        self._variable, self._start, self._stop = variable, start, stop
        self.shape = tf.TensorShape([stop - start])

    def read_value(self) -> tf.Tensor:
        return tf.reshape(self._variable.read_value(), [-1])[self._start : self._stop]

    def assign(self, value: tf.Tensor, read_value: bool = True) -> Any:
        held = tf.reshape(self._variable.read_value(), [-1])
        whole = tf.concat([held[: self._start], value, held[self._stop :]], 0)
        return self._variable.assign(tf.reshape(whole, self._variable.shape), read_value=read_value)


tf.register_tensor_conversion_function(StatePart, lambda part, *unused, **options: part.read_value())


class Member(NamedTuple):
    """A gradient, and what its exchange needs.

    ``factor`` takes the numbers of the carrier that came back, and raises if the workers meant different gradients;
    ``disagreement`` is what it says then.
    """

    tensor: tf.Tensor
    name: str
    scheme: Scheme
    chain: KeyChain
    signs: Sequence[float]
    factor: Callable[[Sequence[float]], float]
    disagreement: str
    state: HeldState | None = None

    def owned_state(self, scheme: Scheme, workers: Workers) -> HeldState | None:
        """The state of the elements that this worker keeps."""
        if self.state is None:
            return None
        elements = self.state.momentum.shape.num_elements()
        start, stop = scheme.owned(self.name, elements, workers)
        if (start, stop) == (0, elements):
            return self.state
        momentum, scale = (StatePart(held, start, stop) for held in (self.state.momentum, self.state.scale))
        return self.state._replace(momentum=momentum, scale=scale)

    @property
    def bytes(self) -> int | None:
        """Bytes of the gradient, None where its shape is not known yet."""
        elements: Any = self.tensor.shape.num_elements()
        return None if elements is None else elements * self.tensor.dtype.size
