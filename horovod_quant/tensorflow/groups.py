"""Groups of gradients that Horovod reduces together, and their division by collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

import tensorflow as tf

from horovod_quant.schemes.base import Scheme
from horovod_quant.tensorflow.horovod_call import HorovodCall
from horovod_quant.tensorflow.member import Member

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
