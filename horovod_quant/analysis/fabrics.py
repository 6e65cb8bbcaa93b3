"""Named links and accelerators; docs/advise.md has the sources.

Units: seconds, bytes, bytes per second. The bandwidth of a host's link is that of each direction, headers included;
that between workers of a host is NCCL's assumption or a report's measurement.
"""

from __future__ import annotations

from typing import NamedTuple

GIGABIT, GIGABYTE = 1e9 / 8, 1e9

TCP = 50e-6
"""Latency through TCP: an assumption."""
INFINIBAND, PCIE, NVLINK = 9.6e-6, 5.7e-6, 3.4e-6
"""Latencies of src/graph/tuning.cc of NCCL 2.8 (ring)."""


class Fabric(NamedTuple):
    """Bandwidth of a link in each direction, and latency per message."""

    bandwidth: float
    latency: float


BETWEEN_HOSTS = {
    "10gbe": Fabric(10 * GIGABIT, TCP),
    "25gbe": Fabric(25 * GIGABIT, TCP),
    "100gbe": Fabric(100 * GIGABIT, TCP),
    "infiniband-edr": Fabric(100 * GIGABIT, INFINIBAND),
    "infiniband-hdr": Fabric(200 * GIGABIT, INFINIBAND),
    "infiniband-ndr": Fabric(400 * GIGABIT, INFINIBAND),
}
"""Links between hosts."""

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
