"""Rank and size from a process's launcher, before Horovod is initialized."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from horovod_quant.cli.problem import Problem

# Environment variables of each launcher with a worker's rank and the number of workers.
HOROVOD = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
TORCHRUN = ("RANK", "WORLD_SIZE")


class LaunchContext(NamedTuple):
    """Position of this process among the workers; size 0 without a launcher."""

    rank: int
    size: int


def find_launch_context(launchers: Sequence[tuple[str, str]] = HOROVOD) -> LaunchContext:
    """Return the position that the launcher has written into the environment.

    Raises:
        Problem: it is not what a launcher writes.
    """
    for names in launchers:
        if all(name in os.environ for name in names):
            found = []
            for name in names:
                with Problem.of(f"{name}={os.environ[name]!r}"):
                    found.append(int(os.environ[name]))
            return LaunchContext(*found)
    return LaunchContext(0, 0)
