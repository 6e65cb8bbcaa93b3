"""Groups of gradients that Horovod reduces together, and their division by collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod_quant.schemes.base import Scheme
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


def cut(members: Sequence[Member], group_bytes: int) -> list[list[int]]:
    """Return the indices of members that share collectives."""
    groups: list[list[int]] = []
    open_groups: dict[Scheme, tuple[list[int], int]] = {}
    for position, member in enumerate(members):
        own = group_bytes if member.bytes is None else member.bytes
        group, room = open_groups.get(member.scheme, ([], 0))
        if own > room:
            group, room = [], group_bytes
            groups.append(group)
        group.append(position)
        open_groups[member.scheme] = (group, room - own)
    return groups
