"""Links and accelerators by name, as users have them; docs/advise.md has their sources.

Units: seconds, bytes, bytes per second. A host's link counts in each direction, with all that is on the wire; a link
between workers of a host is what NCCL assumes, or what a report has measured.
"""

from __future__ import annotations

from typing import NamedTuple

GIGABIT, GIGABYTE = 1e9 / 8, 1e9

TCP = 50e-6
"""Latency through TCP: an assumption."""
INFINIBAND, PCIE, NVLINK = 9.6e-6, 5.7e-6, 3.4e-6
"""Latencies of src/graph/tuning.cc of NCCL 2.8 (ring)."""


class Fabric(NamedTuple):
    """The bandwidth of a kind of links, each direction, and the latency of a message besides its bytes."""

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
"""A host's link to the others."""

INSIDE_HOST = {
    "pcie3": Fabric(12 * GIGABYTE, PCIE),
    "pcie4": Fabric(24 * GIGABYTE, PCIE),
    "host-memory": Fabric(3.9 * GIGABYTE, PCIE),
    "nvlink2": Fabric(6 * 20.0 * GIGABYTE, NVLINK),
    "nvlink3": Fabric(12 * 20.0 * GIGABYTE, NVLINK),
    "nvlink3-pair": Fabric(4 * 20.0 * GIGABYTE, NVLINK),
    "nvlink4": Fabric(18 * 20.6 * GIGABYTE, NVLINK),
}
"""Between workers of a host: V100, A100 (all links, or those between two of four on a board), H100."""

ACCELERATORS = {"v100": 900 * GIGABYTE, "a100": 2039 * GIGABYTE, "h100": 3350 * GIGABYTE}
"""The bandwidth of their memory."""
