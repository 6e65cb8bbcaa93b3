"""Groups of gradients of one scheme that share collectives."""

from __future__ import annotations

from collections.abc import Sequence
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
    room_of_group = max(group_bytes, total // most_groups)
    open_groups: dict[Scheme, list[str]] = {}
    room: dict[Scheme, int] = {}
    groups: list[list[str]] = []
    for member in members:
        scheme = member.scheme
        if scheme in open_groups and member.bytes > room[scheme]:
            groups.append(open_groups.pop(scheme))
        if scheme not in open_groups:
            open_groups[scheme], room[scheme] = [], room_of_group
        open_groups[scheme].append(member.name)
        room[scheme] -= member.bytes
    groups.extend(open_groups.values())
    at = {member.name: position for position, member in enumerate(members)}
    return sorted(groups, key=lambda names: at[names[-1]])
