"""Groups of gradients that Horovod reduces together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod_quant.tensorflow.horovod_call import HorovodCall
from horovod_quant.tensorflow.member import Member


class Group:
    """Gradients that Horovod groups, reduced together once all are known."""

    def __init__(
        self, siblings: Sequence[Any], build: Callable[[list[Member], HorovodCall, tf.Tensor], Callable]
    ) -> None:
        self.siblings = siblings
        self.members: list[Member] = []
        self._calls: list[HorovodCall] = []
        self._build = build
        self._result: Callable[[int, tf.Tensor], tf.Tensor] | None = None

    def add(self, member: Member, call: HorovodCall) -> int:
        self.members.append(member)
        self._calls.append(call)
        return len(self.members) - 1

    def result(self, position: int, output: tf.Tensor) -> tf.Tensor:
        if self._result is None:
            self._result = self._build(self.members, self._calls[0], output)
        return self._result(position, output)
