"""Rank and size from a process's launcher, before Horovod is initialized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Position of this process among the workers.

    Attributes:
        size: number of workers; 0 without a launcher.
        gloo: True if Horovod's Gloo controller will run.
    """

    rank: int
    size: int
    gloo: bool


def find_launch_context(
    environment: Mapping[str, str], launchers: Sequence[tuple[str, str]] = HOROVOD
) -> LaunchContext:
    """Return the position that the launcher has written into the environment.

    Raises:
        Problem: it is not what a launcher writes.
    """
    for rank, size in launchers:
        if rank in environment and size in environment:
            gloo = "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environment
            for name in (rank, size):
                with Problem.of(f"{name}={environment[name]!r}"):
                    int(environment[name])
            return LaunchContext(int(environment[rank]), int(environment[size]), gloo)
    return LaunchContext(0, 0, False)
