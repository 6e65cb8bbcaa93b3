"""Kernel speeds on an accelerator, estimated from its memory bandwidth.

The shares of some kernels were measured on an H100 and an H200; step communication between several GPUs was not.
"""

from __future__ import annotations

from dataclasses import replace

from horovod_quant.analysis.cost_model import Setting
from horovod_quant.analysis.groups import GROUP_BYTES
from horovod_quant.analysis.kernel_speeds import KernelSpeeds, Speed
from horovod_quant.analysis.models import Shapes
from horovod_quant.analysis.network import NCCL, Network, nccl_software
from horovod_quant.analysis.work import Call

ATTAINED = 0.8
"""Assumed share of the memory bandwidth for unmeasured kernels: the aim of docs/gpu.md."""

SHARES = {
    "encode_uniform_codes": 0.76,
    "decode_uniform_codes": 0.69,
    "encode_exponential": 0.52,
    "encode_rotated": 0.34,
    "decode_rotated": 0.44,
    "add_rotated": 0.44,
    "vote": 0.11,
}
"""Measured shares, the smallest of several: docs/gpu.md, on an H200 (the vote on an H100)."""

_FLOAT = 4.0


# Bytes per element: those read or written once for any number of workers; those for each worker's array, None for the
# bits of the codes.
_TRAFFIC: dict[str, tuple[float, float | None]] = {
    "vote": (1 / 8, 1 / 8),
    "decode_signs": (_FLOAT, 1 / 8),
    "binarize": (5 * _FLOAT, 1 / 8),  # the gradient; momentum and scale, read and written
    "mean": (_FLOAT, _FLOAT),
    "where": (4 * _FLOAT, 0.0),
    "minimum": (3 * _FLOAT, 0.0),
    "less": (3 * _FLOAT, 0.0),
    "scale": (2 * _FLOAT, 0.0),
    "to_float16": (1.5 * _FLOAT, 0.0),
    "to_float32": (2 * _FLOAT, 0.0),
}


def traffic(kernel: str) -> tuple[float, float | None]:
    """Return a kernel's memory traffic in bytes per element, as in `_TRAFFIC`.

    An unknown kernel reads and writes one number per element.
    """
    if kernel in _TRAFFIC:
        return _TRAFFIC[kernel]
    if kernel.startswith(("bucket_", "tensor_", "rotated_samples")):
        return _FLOAT, 0.0
    if kernel.startswith(("encode_", "decode_", "add_", "rotated_sum_checks")):
        return _FLOAT, None
    return 2 * _FLOAT, 0.0


class MemoryBound(KernelSpeeds):
    """Speeds of kernels and casts, by the bytes that they move.

    Args:
        memory_bandwidth: bytes per second, from the data sheet.
    """

    def __init__(self, memory_bandwidth: float) -> None:
        cast = 1.5 * _FLOAT / (ATTAINED * memory_bandwidth)
        super().__init__({}, (cast, cast))
        self.memory_bandwidth = memory_bandwidth

    def _speed(self, call: Call) -> Speed:
        once, of_codes = traffic(call.kernel)
        each = call.bits / 8 if of_codes is None else of_codes
        bandwidth = SHARES.get(call.kernel, ATTAINED) * self.memory_bandwidth
        return Speed((once + each) / bandwidth, each / bandwidth)


def on_accelerators(
    shapes: Shapes, network: Network, memory_bandwidth: float, group_bytes: int = GROUP_BYTES
) -> Setting:
    """Return the setting of gradients on accelerators, reduced over NCCL.

    Args:
        shapes, group_bytes: see `Setting`.
        network: the hosts and links.
        memory_bandwidth: see `MemoryBound`.
    """
    network = replace(network, controller=NCCL, software=nccl_software(memory_bandwidth))
    return Setting(shapes, network, MemoryBound(memory_bandwidth), group_bytes)
