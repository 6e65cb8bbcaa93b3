"""Groups of gradients that Horovod reduces together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from horovod_quant.kernels.keys import RngKey
from horovod_quant.schemes.base import Scheme
from horovod_quant.tensorflow.horovod_call import HorovodCall


class StoredState(NamedTuple):
    """A variable's state for BinSGDM.

    It has float32 variables or parts of them, the decay, the number of the update, and the norm to which the gradient
    is clipped. ``largest`` is the largest magnitude of the averages of the workers' bits; None for bits.
    """

    momentum: Any
    scale: Any
    beta: float
    step: tf.Tensor
    clip_norm: float | None = None
    largest: tf.Variable | None = None


class Member(NamedTuple):
    """A gradient, and the data of its reduction.

    ``factor`` takes the reduced control tensor's numbers, and raises an error with the message ``disagreement`` if the
    workers reduced different gradients. ``step`` is the step in the random key, int64; None where that is the count of
    reductions.
    """

    tensor: tf.Tensor
    name: str
    scheme: Scheme
    chain: RngKey
    signs: Sequence[float]
    factor: Callable[[Sequence[float]], float]
    disagreement: str
    state: StoredState | None = None
    step: tf.Tensor | None = None

    @property
    def bytes(self) -> int | None:
        """Bytes of the gradient; None where its shape is not known yet."""
        elements: Any = self.tensor.shape.num_elements()
        return None if elements is None else elements * self.tensor.dtype.size


Results = dict[int, Callable[[tf.Tensor], tf.Tensor]]
"""Functions from a member's control tensor to its result, by its position."""


class Group:
    """Gradients that Horovod groups, reduced together once all are known."""

    def __init__(
        self, call: HorovodCall, build: Callable[[list[Member], HorovodCall, tf.Tensor], Results]
    ) -> None:
        self.call = call  # of the first member
        self.members: list[Member] = []
        self._build = build
        self._results: Results | None = None

    def add(self, member: Member) -> int:
        self.members.append(member)
        return len(self.members) - 1

    def result(self, position: int, output: tf.Tensor) -> tf.Tensor:
        if self._results is None:
            self._results = self._build(self.members, self.call, output)
        return self._results[position](output)
