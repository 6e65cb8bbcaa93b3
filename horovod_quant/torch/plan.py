"""Which gradients share their collectives, as all workers have agreed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from horovod_quant.frontends.groups import cut
from horovod_quant.frontends.nodes import Nodes
from horovod_quant.torch.exchange import AnyMember, needs_everybody, stages_of
from horovod_quant.torch.memory import Memory

NEVER = 2**30
"""Place of a gradient that no backward pass has produced."""


class Plan(NamedTuple):
    """The agreed groups.

    Attributes:
        groups: the names of each group's gradients, in the order in which the groups become complete.
        group_of: the number of each gradient's group.
        due: for each group, how many gradients have arrived when it is complete on every worker, as long as gradients
            come in the order in which they came when this was agreed on.
        stages: how many collectives each group takes.
        after_roll_call: the groups whose exchange depends on who is there.
        names: of all gradients, with or without a group.
        quiet: whether nobody but the optimizers of a backward pass starts operations of Horovod's during it.
    """

    groups: list[list[str]]
    group_of: dict[str, int]
    due: list[int]
    stages: list[int]
    after_roll_call: frozenset[int]
    names: frozenset[str]
    quiet: bool

    @property
    def is_complete(self) -> bool:
        """Whether every gradient has a group."""
        return len(self.group_of) == len(self.names)


def agree(
    members: Mapping[str, AnyMember],
    places: Mapping[str, int],
    quiet: bool,
    *,
    label: str,
    nodes: Nodes,
    memory: Memory,
    group_bytes: int,
    operations: int,
    process_set: Any,
) -> Plan:
    """The plan for the coming steps, by one maximum over all workers of each gradient's place. Waits for them.

    Args:
        members: the step's gradients, by name.
        places: how many gradients came before each on this worker; or `NEVER`.
        quiet: whether this worker saw nobody else's operations during its backward pass.
        label: of the collective's name, the same on every worker.
        nodes: the workers.
        memory: where the gradients are.
        group_bytes, operations: see `cut`.
        process_set: Horovod's workers.
    """
    import horovod.torch as hvd

    names = sorted(members)
    own = torch.tensor([*(places[name] for name in names), not quiet], dtype=torch.int32, device="cpu")
    name = f"horovod_quant.{label}.order"
    *agreed, disturbed = hvd.allreduce(own, op=hvd.Max, name=name, process_set=process_set).tolist()
    place_of = {name: place for name, place in zip(names, agreed) if place < NEVER}
    placed = [members[name] for name in sorted(place_of, key=lambda name: place_of[name])]
    groups = cut(placed, group_bytes, operations)
    of_group = [[members[name] for name in group] for group in groups]
    return Plan(
        groups=groups,
        group_of={name: index for index, group in enumerate(groups) for name in group},
        due=[1 + max(place_of[name] for name in group) for group in groups],
        stages=[stages_of(gradients, nodes, memory) for gradients in of_group],
        after_roll_call=frozenset(
            index for index, gradients in enumerate(of_group) if needs_everybody(gradients, nodes, memory)
        ),
        names=frozenset(names),
        quiet=not disturbed,
    )
