"""Files of kernel speeds, so that tables are equal on all machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod_quant.analysis.kernel_speeds import KernelSpeeds, Speed


def as_json(speeds: KernelSpeeds) -> dict[str, Any]:
    """Return the speeds in types of JSON."""
    return {
        "kernels": [[kernel, bits, *speed] for (kernel, bits), speed in speeds.kernels.items()],
        "half": list(speeds.half),
    }


def from_json(found: Mapping[str, Any]) -> KernelSpeeds:
    """Return the speeds that `as_json` returned."""
    measured = {(kernel, bits): Speed(first, more) for kernel, bits, first, more in found["kernels"]}
    return KernelSpeeds(measured, tuple(found["half"]))
