"""Named intra-node links, and accelerators; docs/advise.md has the sources.

Units: seconds, bytes, bytes per second. The bandwidth of a link is NCCL's assumption or a report's measurement.
"""

from __future__ import annotations

from typing import NamedTuple

GIGABIT, GIGABYTE = 1e9 / 8, 1e9

PCIE, NVLINK = 5.7e-6, 3.4e-6
"""Latencies of src/graph/tuning.cc of NCCL 2.8 (ring)."""


class Fabric(NamedTuple):
    """Bandwidth of a link in each direction, and latency per message."""

    bandwidth: float
    latency: float


INSIDE_HOST = {
    "pcie3": Fabric(12 * GIGABYTE, PCIE),
    "pcie4": Fabric(24 * GIGABYTE, PCIE),
    "host-memory": Fabric(3.9 * GIGABYTE, PCIE),
    "nvlink2": Fabric(6 * 20.0 * GIGABYTE, NVLINK),
    "nvlink3": Fabric(12 * 20.0 * GIGABYTE, NVLINK),
    "nvlink3-pair": Fabric(4 * 20.0 * GIGABYTE, NVLINK),
    "nvlink4": Fabric(18 * 20.6 * GIGABYTE, NVLINK),
}
"""Links between workers of a host: V100, A100 (all, or between two of four on a board), H100."""

ACCELERATORS = {"v100": 900 * GIGABYTE, "a100": 2039 * GIGABYTE, "h100": 3350 * GIGABYTE}
"""Memory bandwidths of accelerators."""
