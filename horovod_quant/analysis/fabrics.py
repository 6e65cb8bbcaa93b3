"""Links and accelerators by name, each with its source: what users have, and need not look up.

Units: seconds, bytes, bytes per second. A host's link counts in each direction, with all that is on the wire; a link
between workers of a host is what NCCL reckons with, or what somebody measured.
"""

from __future__ import annotations

from typing import NamedTuple

GIGABIT, GIGABYTE = 1e9 / 8, 1e9


class Fabric(NamedTuple):
    """Links of a kind.

    Attributes:
        bandwidth: of a link, each direction.
        latency: of a message besides its bytes.
        source: where both are from.
    """

    bandwidth: float
    latency: float
    source: str


_TOPOLOGY = "src/graph/topo.h of NCCL"
_TUNING = "src/graph/tuning.cc of NCCL 2.8 (ring)"


def _ethernet(gigabits: float, standard: str) -> Fabric:
    return Fabric(
        gigabits * GIGABIT, 50e-6, f"IEEE {standard}'s rate; latency through TCP: this project's assumption"
    )


def _infiniband(gigabits: float) -> Fabric:
    return Fabric(
        gigabits * GIGABIT, 9.6e-6, f"the InfiniBand Trade Association's rate of 4 lanes; latency: {_TUNING}"
    )


def _pcie(gigabytes: float, constant: str) -> Fabric:
    return Fabric(gigabytes * GIGABYTE, 5.7e-6, f"{constant} of {_TOPOLOGY}; latency: {_TUNING}")


def _nvlink(links: int, gigabytes: float, constant: str) -> Fabric:
    return Fabric(
        links * gigabytes * GIGABYTE,
        3.4e-6,
        f"{links} links, each {constant} of {_TOPOLOGY}; latency: {_TUNING}",
    )


BETWEEN_HOSTS = {
    "10gbe": _ethernet(10, "802.3ae"),
    "25gbe": _ethernet(25, "802.3by"),
    "100gbe": _ethernet(100, "802.3ba"),
    "infiniband-edr": _infiniband(100),
    "infiniband-hdr": _infiniband(200),
    "infiniband-ndr": _infiniband(400),
}
"""A host's link to the others."""

INSIDE_HOST = {
    "pcie3": _pcie(12, "PCI_BW (x16)"),
    "pcie4": _pcie(24, "AMD_ZEN34_BW (x16)"),
    "host-memory": Fabric(
        3.9 * GIGABYTE, 5.7e-6,
        "GPUs without peer-to-peer: an allreduce of two over PCIe 3 with NCCL_P2P_DISABLE=1, as measured in issue 384 "
        f"of NCCL; latency: {_TUNING}",
    ),
    "nvlink2": _nvlink(6, 20.0, "SM70_NVLINK_BW"),
    "nvlink3": _nvlink(12, 20.0, "SM80_NVLINK_BW"),
    "nvlink3-pair": _nvlink(4, 20.0, "SM80_NVLINK_BW"),
    "nvlink4": _nvlink(18, 20.6, "SM90_NVLINK_BW"),
}  # fmt: skip
"""Between workers of a host: V100, A100 (all links, or those between two of four on a board), H100."""


class Accelerator(NamedTuple):
    """``memory_bandwidth`` is what the data sheet says."""

    memory_bandwidth: float
    source: str


ACCELERATORS = {
    "v100": Accelerator(900 * GIGABYTE, "NVIDIA's data sheet of the V100 SXM2"),
    "a100": Accelerator(2039 * GIGABYTE, "NVIDIA's data sheet of the A100 80GB SXM"),
    "h100": Accelerator(3350 * GIGABYTE, "NVIDIA's data sheet of the H100 SXM"),
}
