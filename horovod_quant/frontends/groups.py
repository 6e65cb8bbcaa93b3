"""Groups of gradients of one scheme that share collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from horovod_quant.schemes.base import Scheme

# Horovod's response cache has 1,024 entries, and each of the optimizer's own operations takes one.
_CACHE_ENTRIES = 1000
_COLLECTIVES_PER_GROUP = 3
_FEWEST_GROUPS = 4


class Member(NamedTuple):
    """Gradient with its name, scheme and bytes."""

    name: str
    scheme: Scheme
    bytes: int


def cut(members: Sequence[Member], group_bytes: int, operations: int) -> list[list[str]]:
    """Cut gradients into groups of one scheme, ordered by last members.

    Args:
        members: the gradients, in their order of arrival.
        group_bytes: bytes of gradients per group; more if Horovod's cache would overflow.
        operations: number of the optimizer's operations in a step.

    Returns:
        The names of each group's gradients.
    """
    total = sum(member.bytes for member in members)
    deepest = max((len(member.scheme.collectives) for member in members), default=0)
    collectives = max(deepest, _COLLECTIVES_PER_GROUP)
    most_groups = max(_FEWEST_GROUPS, (_CACHE_ENTRIES - operations) // collectives)
    sizes = [(member.scheme, member.bytes) for member in members]
    groups = cut_by_scheme(sizes, max(group_bytes, total // most_groups))
    return [[members[i].name for i in group] for group in sorted(groups, key=lambda group: group[-1])]


def cut_by_scheme(sizes: Iterable[tuple[Scheme, int]], group_bytes: int) -> list[list[int]]:
    """Return the positions of each group's gradients, ordered by first members.

    Args:
        sizes: scheme and bytes of the gradients, in their order of arrival.
        group_bytes: bytes of gradients per group.
    """
    groups: list[list[int]] = []
    open_groups: dict[Scheme, tuple[list[int], int]] = {}
    for position, (scheme, size) in enumerate(sizes):
        group, room = open_groups.get(scheme, ([], -1))
        if size > room:
            group, room = [], group_bytes
            groups.append(group)
        group.append(position)
        open_groups[scheme] = (group, room - size)
    return groups
