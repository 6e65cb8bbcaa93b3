"""Comparison of a benchmark's memory per host with the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from horovod_quant.analysis.models import Shapes, elements
from horovod_quant.bench.variants import Variant

MEMINFO, LIMIT = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")


def free_bytes() -> int | None:
    """Return the bytes free for this host's processes; None if unknown."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        lines = [line.split() for line in MEMINFO.read_text().splitlines()]
        found += [1024 * int(line[1]) for line in lines if line[0] == "MemAvailable:"]
    with suppress(OSError, ValueError):  # "max" is no limit
        found.append(int(LIMIT.read_text()))
    return min(found, default=None)


def memory_problem(
    shapes: Shapes, variants: Sequence[Variant], workers: int, workers_per_host: int, free: int | None
) -> str:
    """Return why the gradients do not fit into host memory, or "".

    Each worker has the gradients twice, in float32, momentum and scale for each method that is an optimizer, and its
    share of the exact average, in float64. That is a lower bound of the memory.
    """
    states = sum(variant.own_optimizer is not None for variant in variants)
    count = elements(shapes)
    needed = workers_per_host * (4 * count * (2 + 2 * states) + 8 * count // workers)
    if free is None or needed <= free:
        return ""
    return (
        f"--model, --shapes: {count:,} elements need {needed / 1e9:,.1f} GB of memory on a host with "
        f"{workers_per_host} of the workers, and {free / 1e9:,.1f} GB are free; use fewer elements, or fewer workers "
        f"on each host"
    )
